"""A machine whose ports are all taken, as a network namespace of its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi
FULL = """
import socket, subprocess, sys
open("/proc/sys/net/ipv4/ip_local_port_range", "w").write("1024 65300")
held = [socket.create_server(("", port)) for port in range(65301, 65536)]
sys.exit(subprocess.run([sys.executable, "-m", "ttlaunch", "run", "-n", "2", "train.py"]).returncode)
"""


@pytest.mark.usefixtures("_hosts_can_start")
def test_a_machine_without_a_free_port_is_named_and_nothing_is_left(here):
    (here / "train.py").write_text("")
    (here / "full.py").write_text(FULL)
    up = 'ip link set lo up && exec "$0" full.py'
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", up, sys.executable], capture_output=True, text=True, timeout=60, check=False
    )
    assert 4 == done.returncode
    assert done.stderr.startswith("error[P068]: this machine has no free port for the store of rank 0: ")
    assert ["full.py", "train.py"] == sorted(path.name for path in here.iterdir())
