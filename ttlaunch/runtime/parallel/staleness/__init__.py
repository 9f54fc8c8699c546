"""Data parallelism in which workers drift apart: by a bounded number of steps, or for some local steps between averages."""
