"""A rank as a worker of an elastic run: it takes the coordinator's orders, and gets what it lacks from other workers' memory."""
