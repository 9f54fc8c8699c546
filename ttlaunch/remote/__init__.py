"""The one door to other machines: a `Transport` runs commands on one host, over SSH, on this machine, or in memory."""

import sys

# paramiko imports this task runner, a third of its own start-up, for `Match exec` alone, which `ssh_config.py` runs itself.
sys.modules.setdefault("invoke", None)  # type: ignore[arg-type]
