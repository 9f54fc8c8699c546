"""Everything that ranks, shims and agents write and the launcher reads, as typed and bounded values."""
