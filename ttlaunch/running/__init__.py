"""Carry out a plan: check the machine, write the run folder, start the engine, watch it, report, and clean up."""
