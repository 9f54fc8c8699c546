"""Data parallelism in which workers may be some steps apart, or take local steps between two averages of their weights."""
