"""Gradients in fewer bytes: codecs for any flow of gradients, and the errors that they still have to make up for."""
