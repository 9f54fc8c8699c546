"""A trained model that ranks share and answer with: the head, what joins it to those who ask, and its other ranks."""
