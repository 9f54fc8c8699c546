"""Torch's FSDP2 under the recipes' model: every rank keeps rows of every parameter, and its collectives are counted."""
