"""Engines start the shims of a run's ranks: `base.py` is the protocol, each engine is a file, `choose.py` finds one."""
