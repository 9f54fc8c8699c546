"""Runs as folders: made, found again, listed, compared, cleaned and followed from any process."""
