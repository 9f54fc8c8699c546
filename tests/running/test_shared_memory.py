"""Memory that the ranks of a machine share lies in the run's own folder, and goes with it however the run ends."""

import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

SHARES = """\
import os, pathlib, time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "_segment." in line}
rank = MPI.COMM_WORLD.rank
pathlib.Path(f"part-{rank}").write_text("\\n".join(sorted(mapped)))
os.replace(f"part-{rank}", f"up-{rank}")
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["mpirun", "rank"])
@pytest.mark.core
def test_a_killed_run_leaves_no_shared_memory(here, start_run, victim):
    (here / "work.py").write_text(SHARES)
    run = start_run("work.py", "-n", "2")
    segments = {Path(line) for rank in (0, 1) for line in run.wait_for_file(f"up-{rank}").splitlines()}
    assert segments
    scratch = {path.parts[3] for path in segments}
    assert all(name.startswith("ttl-") for name in scratch), segments
    os.kill(run.mpirun() if victim == "mpirun" else run.records(1)[0]["pid"], signal.SIGKILL)
    assert run.ends(within_s=30) == 1
    assert [path for path in segments if path.exists()] == []
    assert [name for name in scratch if Path("/dev/shm", name).exists()] == []  # noqa: S108 - looked at, not used
