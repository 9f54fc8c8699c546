"""Options of runs whose claim does not depend on how ranks begin or what carries their messages."""

FORKED = ("--warm", "--set", "multihost_config.socket_type=grpc")
"""The ranks of a recipe are forks of one process that has imported torch, which takes each of them longer than the steps of a test.

Ranks over MPI import it themselves: `tests/running`, `tests/engines` and `ttlaunch parity` have them.
"""
FORKED_LINE = " ".join(FORKED)
FORKED_IN_PYTHON = {"warm": True, "set": {"multihost_config.socket_type": "grpc"}}
"""`FORKED` as arguments of `ttlaunch.run`."""
