"""Talking to a trained model: what a serving run and the programs in front of it say to each other, and those programs."""
