"""Hosts of Slurm: what one whose owner rewrites what its steps say can do, and what listens while a run is active."""

import ipaddress
import signal
import struct

import pytest

from tests.cluster.hosts import LAUNCHER
from tests.cluster.keeper import wait_until
from tests.cluster.test_hostile_host import LIES, WORDS, WORK
from tests.cluster.test_slurm_runs import leftovers
from tests.security.hostile import raw_frame
from tests.security.listeners import addresses_of
from ttlaunch import contract

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

IN_BETWEEN = """\
#!/usr/bin/python3
import os, subprocess, sys
if "IN_BETWEEN" in os.environ:
    os.execv("/root/sh", ["sh", *sys.argv[1:]])
command = subprocess.Popen(["/root/sh", *sys.argv[1:]], stdout=subprocess.PIPE, env={**os.environ, "IN_BETWEEN": ""})
while some := os.read(command.stdout.fileno(), 65536):
    sys.stdout.buffer.write(some)
    if b"ready" in some:
        sys.stdout.buffer.write(open("/root/lies", "rb").read())
    sys.stdout.buffer.flush()
sys.exit(command.wait())
"""
"""The shell of one host, which runs the real one and adds lies after the greeting of an agent."""

LIES_OF_STEPS = {
    "a gap of terabytes": LIES["a gap of terabytes"],
    "a frame of gigabytes": struct.pack(">II", 2**31, 2**32 - 1) + bytes(2**20),
    "a flood of frames": raw_frame(b'{"kind": "alive", "clock": 1.0, "done": 0}') * 200_000 + b"?" * 64,
}
JOINS = """\
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(100_000))
print("up", os.environ["RANK"], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("lie", LIES_OF_STEPS.values(), ids=LIES_OF_STEPS)
def test_a_host_whose_steps_lie_ends_the_run_in_its_name_and_takes_nothing_from_the_others(
    make_slurm, ttlaunch_on, tmp_path, lie
):
    slurm = make_slurm(hosts=2)
    (tmp_path / "work.py").write_text(WORK)
    home = slurm.cluster.path("node1", "/root")
    (home / "in_between").write_text(IN_BETWEEN)
    (home / "in_between").chmod(0o755)
    (home / "lies").write_bytes(lie)
    slurm.run("node1", ["cp", "/usr/bin/dash", "/root/sh"])
    slurm.run("node1", ["mount", "--bind", "/root/in_between", "/usr/bin/dash"])
    answer = ttlaunch_on(slurm.cluster)("run work.py --on slurm --nodes 2", timeout_s=120)
    assert answer.status in (contract.STATUS_HOST, contract.STATUS_HOST_LOST), (answer.stdout, answer.stderr)
    assert "host node1" in answer.stderr, answer.stderr
    assert "host node0" not in answer.stderr
    assert "Traceback" not in answer.stderr
    assert WORDS in answer.stdout
    assert [] == list((tmp_path / "runs").rglob("*999999999*"))
    wait_until(
        lambda: [] == [one for one in leftovers(slurm) if one[0] != "node1"], what="nothing is left", timeout_s=60
    )


def test_nothing_of_ttlaunch_listens_and_the_store_of_torch_only_on_the_address_of_rank_0(
    slurm4, ttlaunch_on, tmp_path
):
    """srun listens for the streams of its steps, and salloc, whose socket `cat` inherits, for news of the job."""
    (tmp_path / "joins.py").write_text(JOINS)
    process = ttlaunch_on(slurm4.cluster).start("run joins.py --on slurm --nodes 2")
    up = set()
    while len(up) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        up |= {line.split()[-1]} if "up " in line else set()
    of_slurm = ("srun", "salloc", "cat", "slurm", "munged", "sshd", "/usr/sbin/")
    for name in (LAUNCHER, "node0", "node1"):
        processes = {pid: words for pid, words in slurm4.cluster.pids(name).items() if not words.startswith(of_slurm)}
        ranks = [pid for pid, words in processes.items() if words.endswith("/joins.py")]
        listening = [words for pid, words in processes.items() if pid not in ranks and addresses_of([pid])]
        assert [] == listening, name
        own = ipaddress.ip_address(slurm4.cluster.ip(name))
        assert {own} >= set(addresses_of(ranks)), name
        assert name == LAUNCHER or ranks, processes
        assert name != "node0" or addresses_of(ranks), "the store of torch"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
