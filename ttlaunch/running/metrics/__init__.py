"""The measurements of a run as one log of events, and the sinks that export them."""
