"""Engines: what starts the shims of a run's ranks. `base.py` is the seam, each engine has a file of its own, `choose.py` finds one."""
