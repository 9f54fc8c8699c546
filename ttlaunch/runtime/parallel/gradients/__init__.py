"""Gradients shared among ranks that all hold the model, in buckets and behind the backward pass."""
