"""The workers of a run that may come and go: the service for those that come by themselves, and how they are admitted."""
