"""The ways to train in parallel: each folder is one technique, and adapts the single-device model and update to it."""
