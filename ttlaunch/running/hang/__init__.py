"""Whether a run hangs, who waits for whom, and whose fault it is."""
