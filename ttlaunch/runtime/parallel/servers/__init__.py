"""Parameter servers: ranks that keep weights and optimizer state for workers that differentiate."""
