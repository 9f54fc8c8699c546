"""Whatever a rank of a program dies of, it is named, with what it died of and the line where that can be known.

A fixed selection of what `benchmarks/attribution.py` breaks: every kind of fault once.
"""

import os
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

RING = """\
import ctypes, os, resource, signal, sys, time
from mpi4py import MPI
for step in range(300):
    time.sleep(0.002)
    MPI.COMM_WORLD.allreduce(1)
    if step == 20 and MPI.COMM_WORLD.rank == {guilty}:
        {fault}
"""
TAKE_ALL = """\
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 2**28,) * 2)
        pieces = [bytearray(2**24) for _ in range(100)]"""
FAULTS = {
    "raise": ('raise ValueError("bucket 7")', "R002", "raised", "raised ValueError", 7),
    "os._exit": ("os._exit(4)", "R003", "exited", "exited with status 4", None),
    "SIGSEGV": ("ctypes.string_at(0)", "R004", "crashed", "crashed with SIGSEGV", 7),
    "sys.exit": ("sys.exit(3)", "R003", "exited", "exited with status 3", None),
    "abort in C": ("ctypes.CDLL(None).abort()", "R004", "crashed", "crashed with SIGABRT", 7),
    "memory": (TAKE_ALL.strip(), "R024", "out_of_memory", "ran out of memory", 9),
    "import": ("import no_such", "R025", "import_error", "could not import: No module named 'no_such'", 7),
    "left": ("os._exit(0)", "R005", "left_early", "left with status 0 before the other ranks", None),
    "words": ('raise OSError("https://x.example: Connection reset by peer")', "R002", "raised", "raised OSError", 7),
    "empty": ("__import__('pickle').loads(b'')", "R002", "raised", "raised EOFError", 7),
    "refused": (
        "__import__('socket').create_connection(('127.0.0.1', 1))",
        "R002",
        "raised",
        "raised ConnectionRefusedError",
        7,
    ),
    "long": ('raise ValueError("x" * 20_000)', "R002", "raised", "raised ValueError", 7),
    "group": ('raise ExceptionGroup("", [ValueError("a")])', "R002", "raised", "raised ExceptionGroup", 7),
    "MPI": ("MPI.COMM_WORLD.send(1, dest=77)", "R002", "raised", "raised mpi4py.MPI.Exception", 7),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "R004", "killed", "was killed by SIGKILL", None),
}
# Every rank is connected to every other one, so all see at once that one has gone.
STORM = """\
import os, signal, socket, sys
from pathlib import Path
rank, size = int(os.environ["TTLAUNCH_RANK"]), int(os.environ["TTLAUNCH_WORLD_SIZE"])
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"part-{rank}")
listener.listen(size)
os.replace(f"part-{rank}", f"socket-{rank}")
peers = []
for other in range(rank):
    while not Path(f"socket-{other}").exists():
        pass
    peers.append(socket.socket(socket.AF_UNIX))
    peers[-1].connect(f"socket-{other}")
peers += [listener.accept()[0] for _ in range(rank + 1, size)]
for step in range(10000):
    if step == 50 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for peer in peers:
        peer.sendall(b".")
    for peer in peers:
        if not peer.recv(1):
            raise ConnectionResetError("a peer has closed its connection")
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_broken_rank_is_named_with_its_cause(here, start_run, fault):
    statement, code, kind, cause, line = FAULTS[fault]
    guilty = len(fault) % 3
    (here / "ring.py").write_text(RING.format(guilty=guilty, fault=statement))
    run = start_run("ring.py", "-n", "3")
    assert run.ends(within_s=30) == 1
    failure = run.report["failure"]
    assert (failure["rank"], failure["class"], failure["code"]) == (guilty, kind, code), failure
    assert f"error[{code}]: rank {guilty} (rank, localhost) {cause}\n" in run.stderr
    assert failure["place"] == (line and f"{here}/ring.py:{line}")
    others = " and ".join(str(rank) for rank in range(3) if rank != guilty)
    assert f"note: the first rank to fail; then rank {others} were ended with the run\n" in run.stderr


@pytest.fixture
def small_group():
    """A control group with little memory, of either version."""
    for top, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(top, f"ttlaunch-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(600_000_000))
            break
        group.rmdir()
    else:
        pytest.skip("we may not make a control group here")
    yield group
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_memory_is_told_from_one_that_somebody_killed(
    here, start_run, small_group, until
):
    taking = 'pieces = []\n        while True: pieces.append(b"x" * 2**24)'
    (here / "ring.py").write_text(RING.format(guilty=1, fault=taking))
    run = start_run("ring.py", "-n", "3")
    (small_group / "cgroup.procs").write_text(str(run.process.pid))  # all that it starts is in the group, too
    assert run.ends(within_s=60) == 1
    failure = run.report["failure"]
    assert (failure["rank"], failure["class"], failure["code"]) == (1, "out_of_memory", "R024"), failure
    assert "the kernel killed it, or a child of it, for want of memory" in failure["evidence"]
    until(lambda: not (small_group / "cgroup.procs").read_text(), within_s=10, what="the group is empty")


def test_a_rank_of_a_program_that_raises_and_waits_in_finalize_ends_the_run(here, start_run):
    (here / "ring.py").write_text(RING.format(guilty=1, fault='raise ValueError("bucket 7")'))
    run = start_run("-n", "3", "--", sys.executable, "ring.py")  # not `-m mpi4py`, which aborts MPI
    assert run.ends(within_s=30) == 1
    failure = run.report["failure"]
    assert (failure["rank"], failure["code"], failure["class"]) == (1, "R002", "raised"), failure
    assert failure["place"] == f"{here}/ring.py:7"
    assert "as in MPI_Finalize, which waits for the other ranks" in failure["evidence"][-1]
    assert (
        "hint: with `python -m mpi4py` in place of `python`, a rank that raises ends the others at once" in run.stderr
    )


def test_peers_that_all_lose_their_connection_at_once_are_not_blamed(here, start_run):
    (here / "storm.py").write_text(STORM)
    run = start_run("storm.py", "-n", "4")
    assert run.ends(within_s=30) == 1
    failure = run.report["failure"]
    assert (failure["rank"], failure["class"]) == (1, "killed"), failure
    assert {one["class"] for one in failure["cascade"]} <= {"lost_peer", "ended"}


MESH, _, LOOP = STORM.partition("for step in range(10000):\n")
CLOSES_FIRST = (
    f"{MESH}import time\ndef work():\n  for step in range(10000):\n{LOOP}"
    "try:\n    work()\nfinally:\n    for peer in peers:\n        peer.close()\n    if rank == 1:\n        time.sleep({slow})\n"
)


@pytest.mark.parametrize(
    ("fault", "slow", "code", "kind"),
    [
        ('raise ValueError("bucket 7")', 0.4, "R002", "raised"),
        ('raise ValueError("bucket 7")', 4, "R002", "raised"),
        ("os._exit(0)", 0, "R005", "left_early"),
        ("sys.exit(0)", 0, "R005", "left_early"),
    ],
)
def test_a_rank_that_closes_its_connections_first_is_named_and_not_those_that_notice(
    here, start_run, fault, slow, code, kind
):
    program = CLOSES_FIRST.replace("{slow}", str(slow)).replace("os.kill(os.getpid(), signal.SIGKILL)", fault)
    (here / "storm.py").write_text(program)
    run = start_run("storm.py", "-n", "4")
    assert run.ends(within_s=30) == 1
    failure = run.report["failure"]
    assert (failure["rank"], failure["code"], failure["class"]) == (1, code, kind), failure


KEPT = (  # the connections are closed, and nothing of Python runs in the rank until then
    "if rank == 1:\n    for peer in peers:\n        peer.close()\n    ctypes.PyDLL(None).sleep(3)\n"
)
SLOW_LIBRARY = """\
class Library:
    def __del__(self, rank=rank, sleep=time.sleep):
        sleep(6 if rank == 1 else 0)
library = Library()
"""


@pytest.mark.parametrize(
    ("fault", "before", "after", "code", "kind"),
    [
        ("sys.exit(3)", SLOW_LIBRARY, "", "R003", "exited"),
        ("sys.exit(0)", SLOW_LIBRARY, "", "R005", "left_early"),
        ("raise AssertionError", "", KEPT, "R002", "raised"),
        ("sys.exit(3)", "", KEPT, "R003", "exited"),
        ("os.execvp('true', ['true'])", "", "", "R005", "left_early"),
    ],
    ids=["slow library", "slow library, status 0", "kept by C", "kept by C, status 3", "another program"],
)
def test_a_rank_that_takes_long_to_end_after_it_closed_its_connections_is_waited_for(
    here, start_run, fault, before, after, code, kind
):
    program = CLOSES_FIRST.replace("{slow}", "0").replace("os.kill(os.getpid(), signal.SIGKILL)", fault)
    program = program.replace("import time\n", f"import ctypes, time\n{before}").replace(
        "finally:\n", f"finally:\n{textwrap.indent(after, '    ')}"
    )
    (here / "storm.py").write_text(program)
    run = start_run("storm.py", "-n", "4", "--engine", "agents")
    assert run.ends(within_s=60) == 1
    failure = run.report["failure"]
    assert (failure["rank"], failure["code"], failure["class"]) == (1, code, kind), failure


def test_a_rank_that_tries_again_is_not_blamed_when_another_one_fails(here, start_run):
    patient = "\n      try:\n        raise OSError\n      except OSError:\n        time.sleep(60)"
    program = CLOSES_FIRST.replace("{slow}", "0").replace("os.kill(os.getpid(), signal.SIGKILL)", patient)
    (here / "storm.py").write_text(
        program.replace("work()\nfinally", "work()\nfinally").replace(
            "  for step in", '  if rank == 2:\n    time.sleep(1)\n    raise ValueError("mine")\n  for step in'
        )
    )
    run = start_run("storm.py", "-n", "4")
    assert run.ends(within_s=30) == 1
    assert (run.report["failure"]["rank"], run.report["failure"]["cause"]) == (2, "raised ValueError")


def test_a_peer_in_which_mpi_gave_up_over_tcp_is_not_blamed(here, start_run):
    (here / "ring.py").write_text(RING.format(guilty=1, fault="os._exit(3)"))
    run = start_run("ring.py", "-n", "3", "--mpi-args=--mca btl self,tcp --mca pml ob1")
    assert run.ends(within_s=30) == 1
    failure = run.report["failure"]
    assert (failure["rank"], failure["cause"]) == (1, "exited with status 3"), failure
    assert {one["class"] for one in failure["cascade"]} <= {"lost_peer", "ended"}
