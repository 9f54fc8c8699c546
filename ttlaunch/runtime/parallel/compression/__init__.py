"""Gradients in fewer bytes: codecs that any flow of gradients can send through, and what they still owe."""
