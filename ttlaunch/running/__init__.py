"""Carry a plan out: check the machine, write the run folder, start mpirun, watch, say what broke, leave nothing."""
