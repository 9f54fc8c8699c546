"""Gradients to an aggregator and weights back from an optimizer on another rank."""
