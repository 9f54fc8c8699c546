"""What every training loop does besides communicating: passes, losses, updates, validation, when to stop."""
