"""Checkpoints on the launching machine: complete them from shards, report lost ones, find one to resume from, read them."""
