"""What several ranks do together: sums along one tree, exchanges, agreement; torch's process groups."""
