"""Data parallelism whose workers may differ for a time: by a bounded number of steps, or for some local steps between averages."""
