"""Training with an aggregator: workers send it gradients, and get back weights that an optimizer on another rank updates."""
