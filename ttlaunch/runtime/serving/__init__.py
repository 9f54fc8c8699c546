"""Generates tokens with a trained model: cached forward passes with the training's bits, for many streams at once."""
