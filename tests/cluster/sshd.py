"""The sshd of a test host: starting, stopping, and changing what it offers. Its files lie in /var/ssh of that host."""

import subprocess
from pathlib import Path

from tests.cluster import accounts
from tests.cluster.keeper import wait_until
from tests.cluster.needs import find_tool

PORT = 22
CONFIG = "/var/ssh/sshd_config"
HOST_KEY = "/var/ssh/host_key"
LOG = "/var/log/sshd.log"
PID_FILE = "/run/sshd.pid"
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def start(keeper):
    """Start sshd and return when it listens."""
    _run(keeper, find_tool("sshd"), "-f", CONFIG, "-E", LOG)
    wait_until(_pid_file(keeper).is_file, what="sshd writes its process id, which it does when it listens")


def stop(keeper):
    """Close the port. Sessions that are open stay open."""
    if _pid_file(keeper).is_file():
        _run(keeper, "sh", "-c", f"kill {_pid_file(keeper).read_text(encoding='utf-8').strip()}")
        wait_until(lambda: not _pid_file(keeper).exists(), what="sshd removes its process id when it ends")


def configure(keeper, changes):
    """Write other settings; the next start of sshd obeys them."""
    accounts.write(Path(f"{keeper.root()}{CONFIG}"), accounts.render_sshd_config(changes))


def new_key(keeper):
    accounts.make_key(Path(f"{keeper.root()}{HOST_KEY}"), comment="another key")


def _pid_file(keeper):
    return Path(f"{keeper.root()}{PID_FILE}")


def _run(keeper, *command):
    subprocess.run(
        keeper.argv(*command),
        check=True,
        timeout=30,
        env=_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
