"""What a run has measured as one log of events, and the sinks that take it elsewhere."""
