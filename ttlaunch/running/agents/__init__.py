"""Ranks on other hosts: an attendant on each, the link to it, and mpirun's way there."""
