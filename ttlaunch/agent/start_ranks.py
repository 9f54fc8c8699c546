"""The script by which `rank_starter.py` starts the ranks of one host: one forked shim per rank.

    python -I -S start_ranks.py plan.json [PARENT [ordered]]

Python keeps the bytecode of modules and not that of scripts, so this one is short. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    _package_parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, _package_parent)
    from ttlaunch.agent.rank_starter import main  # the path above makes it importable without site-packages

    sys.path.remove(_package_parent)
    code = main()
    sys.stdout.flush()
    os._exit(code)
