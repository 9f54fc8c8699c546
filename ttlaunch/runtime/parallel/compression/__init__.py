"""Gradients in fewer bytes: codecs for any flow of gradients, and the remainders that they add to the next gradients."""
