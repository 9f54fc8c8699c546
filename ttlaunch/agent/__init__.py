"""What runs on a host outside the ranks. Python 3.9 and the standard library only; it imports nothing but the contract."""

import os

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.py")
"""Where the shim lies on the launching machine."""
