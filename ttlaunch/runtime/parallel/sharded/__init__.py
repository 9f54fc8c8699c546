"""Torch's FSDP2 under the recipes' model: rows of every parameter on each rank, and its collectives in the rank's books."""
