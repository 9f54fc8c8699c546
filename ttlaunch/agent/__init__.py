"""What runs on a host outside the ranks. Python 3.9 and the standard library only; it imports nothing but the contract."""

import os

_FOLDER = os.path.dirname(os.path.abspath(__file__))

SHIM = os.path.join(_FOLDER, "shim.py")
"""The path of the shim on the launching machine."""

START_RANKS = os.path.join(_FOLDER, "start_ranks.py")
"""The path of the script that starts the ranks of an engine without a program of its own."""

PARENT_DEATH = os.path.join(_FOLDER, "parent_death.py")
"""The path of the script that starts mpirun so that it ends with the launcher."""

RELAY = os.path.join(_FOLDER, "relay.py")
"""The path of mpirun's substitute for ssh on the launching machine."""

GUARD = os.path.join(_FOLDER, "guard.py")
"""The path of the script that cleans up after a run whose supervisor is killed."""
