"""Gradients averaged over ranks that all have the whole model, in buckets and during the backward pass."""
