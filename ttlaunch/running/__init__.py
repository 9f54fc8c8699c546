"""Carry a plan out: check the machine, write the run folder, start the engine, watch, say what broke, leave nothing."""
