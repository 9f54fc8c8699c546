"""What runs on a host outside the ranks. Python 3.9 and the standard library only; it imports nothing but the contract."""

import os

_FOLDER = os.path.dirname(os.path.abspath(__file__))

SHIM = os.path.join(_FOLDER, "shim.py")
"""Where the shim lies on the launching machine."""

PARENT_DEATH = os.path.join(_FOLDER, "parent_death.py")
"""What ties mpirun to the launcher."""

RELAY = os.path.join(_FOLDER, "relay.py")
"""Where mpirun's substitute for ssh lies on the launching machine."""

GUARD = os.path.join(_FOLDER, "guard.py")
"""What cleans up after a run whose supervisor is killed."""
