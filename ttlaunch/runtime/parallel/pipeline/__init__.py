"""A model cut into stages: the order of passes, the messages between stages, and a rank's part of the model."""
