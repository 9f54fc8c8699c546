"""What users write, read and checked with the place of every value; no machine is touched."""
