"""Make the code the same on every host: what is copied, what already lies there, and how it arrives whole."""
