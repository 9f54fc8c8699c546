"""When a run over hosts breaks: the rank or host that broke is named, in time, and nothing of the run stays anywhere."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from ttlaunch import contract

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

WAIT = "import os, time\nprint('up', os.environ['TTLAUNCH_RANK'], flush=True)\ntime.sleep(600)\n"
FILL = """\
import os, sys
try:
    with open(os.path.expanduser("~/large"), "wb") as file:
        while True:
            file.write(bytes(2**16))
except OSError:
    os.write(2, b"the disk is full\\n")
    sys.exit(3)
"""
RAISE = """\
import sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
if comm.rank == 1:
    raise ValueError("bucket 7")
comm.recv(source=1)
"""

CLOSES = """\
import os, socket, sys, time
rank, size = int(os.environ["TTLAUNCH_RANK"]), int(os.environ["TTLAUNCH_WORLD_SIZE"])
def connected(port):
    while True:
        try:
            return socket.create_connection(("HOST", port))
        except OSError:
            time.sleep(0.02)
if rank == 0:
    server = socket.create_server(("", 47100))
    peers = [server.accept()[0] for _ in range(1, size)]
else:
    peers = [connected(47100)]
try:
    for step in range(10_000):
        for peer in peers:
            peer.sendall(b".")
        if step == 20 and rank == 0:
            FAULT
        for peer in peers:
            if not peer.recv(1):
                raise ConnectionResetError("a peer has closed its connection")
finally:
    for peer in peers:
        peer.close()
    time.sleep(2 if rank == 0 else 0)
"""


TOLD_WITHIN_S = 10.0
GONE_WITHIN_S = contract.LEASE_S + contract.AFTER_LEASE_S


def agents(cluster, host):
    """Process ids of the daemons there: unlike what serves an SSH connection, they read nothing."""
    return [
        pid
        for pid, line in cluster.pids(host).items()
        if "import sys" in line and Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
    ]


class Started:
    """A run over hosts that is under way: every rank has said that it is up."""

    def __init__(self, command_line, line, *, ranks):
        self.process = command_line.start(line)
        self.lines = []
        while sum("| up " in text for text in self.lines) < ranks:
            self.lines.append(self.process.stdout.readline())
            assert self.lines[-1], (self.lines, self.process.stderr.read())

    def ends(self, *, within_s):
        stdout, stderr = self.process.communicate(timeout=within_s)
        self.stdout, self.stderr = "".join(self.lines) + stdout, stderr
        return self.process.returncode


@pytest.fixture
def cluster(make_cluster):
    return make_cluster(hosts=3)


@pytest.fixture
def engine():
    """The engine of the ranks that wait; tests that depend on it name more than one."""
    return "agents"


@pytest.fixture
def waiting(cluster, ttlaunch_on, lab, tmp_path, engine):  # noqa: F811 - the fixture
    """A run whose three ranks wait for a long time, one on each host."""
    (tmp_path / "wait.py").write_text(WAIT)
    lab(cluster.hostfile())
    options = engine.replace("warm", "agents --warm")
    return Started(ttlaunch_on(cluster), f"run --engine {options} --on lab --ranks 3 -- python3 wait.py", ranks=3)


BOTH = pytest.mark.parametrize("engine", ["agents", "openmpi"])


@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_on_every_host(cluster, waiting, number):
    waiting.process.send_signal(number)
    assert waiting.ends(within_s=20) == (130 if number == signal.SIGINT else 143)
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_a_killed_view_leaves_nothing_on_any_host(cluster, waiting):
    waiting.process.kill()
    waiting.process.communicate(timeout=20)
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run", timeout_s=GONE_WITHIN_S)


def test_a_rank_that_raises_is_named_with_its_host(cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    (tmp_path / "raise.py").write_text(RAISE)
    lab(cluster.hostfile())
    answer = ttlaunch_on(cluster)("run raise.py --on lab --ranks 3", timeout_s=60)
    assert answer.status == 1
    assert "\nerror[R002]: rank 1 (rank, node1) raised ValueError\n" in answer.stderr
    assert "ValueError: bucket 7" in answer.stderr
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


@pytest.mark.parametrize(
    ("fault", "code"),
    [('raise ValueError("bucket 7")', "R002"), ("os._exit(0)", "R005"), ("sys.exit(0)", "R005")],
)
def test_a_rank_that_closes_its_connections_first_is_named_with_its_host(
    cluster,
    ttlaunch_on,
    lab,  # noqa: F811 - the fixture
    tmp_path,
    fault,
    code,
):
    (tmp_path / "closes.py").write_text(CLOSES.replace("HOST", "node0").replace("FAULT", fault))
    lab(cluster.hostfile())
    answer = ttlaunch_on(cluster)("run closes.py --on lab --ranks 3", timeout_s=60)
    assert answer.status == 1
    assert f"\nerror[{code}]: rank 0 (rank, node0) " in f"\n{answer.stderr}", answer.stderr


@BOTH
@pytest.mark.parametrize("what", ["rank", "shim"])
def test_a_killed_process_is_named_with_its_host(cluster, waiting, what):
    rank = next(pid for pid, line in cluster.pids("node2").items() if "wait.py" in line and "sh -c" not in line)
    shim = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(rank if what == "rank" else shim, signal.SIGKILL)
    assert waiting.ends(within_s=20) == 1
    assert "rank 2 (rank, node2)" in waiting.stderr.splitlines()[0]
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


@pytest.mark.parametrize(
    ("engine", "name", "launcher"),
    [
        ("openmpi", "prted", "mpirun"),
        ("agents", "start_ranks", "start_ranks"),
        ("warm", "start_ranks", "start_ranks"),
    ],
    ids=["openmpi", "agents", "warm"],
)
def test_a_run_whose_daemon_on_a_host_was_killed_has_failed(cluster, waiting, tmp_path, name, launcher):
    daemons = [pid for pid in cluster.pids("node1") if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n"]
    os.kill(max(daemons), signal.SIGKILL)
    assert waiting.ends(within_s=30) == 1
    assert waiting.stderr.startswith(
        f"error[R057]: {launcher}'s daemon on node1 was killed, and took the ranks there along\n"
    )
    [report] = tmp_path.glob("runs/*/report.json")
    assert json.loads(report.read_text())["status"] == "failed"
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_a_full_disk_of_a_host_does_not_hide_how_a_rank_ended(make_cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811
    cluster = make_cluster(hosts=2, size_mb=40)
    (tmp_path / "fill.py").write_text(FILL)
    lab(cluster.hostfile())
    answer = ttlaunch_on(cluster)("run --on lab --ranks 1 -- python3 fill.py", timeout_s=60)
    assert answer.status == 1
    assert "error[R003]: rank 0 (rank, node0) exited with status 3\n" in answer.stderr
    assert "warning[R056]: 17 bytes of rank 0's stderr could not be kept\n" in answer.stderr


@pytest.mark.parametrize("engine", ["agents", "warm"])
def test_what_a_killed_agent_left_is_ended_and_removed(cluster, waiting):
    [agent] = agents(cluster, "node1")
    os.kill(agent, signal.SIGKILL)
    assert waiting.ends(within_s=30) == 7
    assert waiting.stderr.startswith("error[R012]: host node1 was lost: its agent is gone: connection refused\n")
    assert not leftovers(cluster)


def test_a_host_whose_agent_was_stopped_is_lost_with_that_reason_and_its_ranks_are_ended(cluster, waiting):
    [agent] = agents(cluster, "node1")
    os.kill(agent, signal.SIGSTOP)
    assert waiting.ends(within_s=40) == 7
    error = next(line for line in waiting.stderr.splitlines() if line.startswith("error"))
    assert error.startswith("error[R012]: host node1 was lost: its agent (process ")
    assert error.endswith(") was stopped by a signal")
    assert not [pid for pid, line in cluster.pids("node1").items() if "wait.py" in line]
    os.kill(agent, signal.SIGCONT)
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


@pytest.mark.parametrize(
    ("removed", "what"), [(".ttlaunch/runs", "the run's folder"), (".ttlaunch", "ttlaunch's folder")]
)
def test_a_removed_folder_of_a_run_on_a_host_is_named_with_who_needed_it(cluster, waiting, tmp_path, removed, what):
    folder = cluster.path("node1", f"/root/{removed}")
    shutil.rmtree(folder.rename(folder.with_name("removed")))  # at once: a look in between would find a part of it gone
    assert waiting.ends(within_s=30) == 1
    notice, error, *rest = waiting.stderr.splitlines()
    assert notice.startswith(f"{what} on node1 was removed: /root/.ttlaunch")
    assert notice.endswith("; the run cannot go on")
    assert error.startswith(f"error[R066]: {what} on node1 was removed: /root/.ttlaunch")
    assert " = note: it was needed by rank 1" in rest
    [report] = tmp_path.glob("runs/*/report.json")
    failure = json.loads(report.read_text())["failure"]
    assert ("folder_lost", "node1", None) == (failure["class"], failure["host"], failure["rank"])
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


@BOTH
def test_a_host_that_loses_power_is_named(cluster, waiting, tmp_path):
    cluster.kill("node1")
    assert waiting.ends(within_s=40) == 7
    told, first, *_ = waiting.stderr.splitlines()
    assert told.startswith("host node1 has not answered for 8 s; ")
    assert first.startswith("error[R012]: host node1 was lost: ")
    [report] = tmp_path.glob("runs/*/report.json")
    assert json.loads(report.read_text())["exit_status"] == 7
    wait_until(lambda: not leftovers(cluster, hosts=["node0", "node2"]), what="hosts as before the run")


def test_a_host_that_is_cut_off_is_named_in_time_and_ends_its_ranks_by_itself(cluster, waiting):
    cluster.link("node1", up=False)
    cut = time.monotonic()
    said = waiting.process.stderr.readline()
    assert time.monotonic() - cut < TOLD_WITHIN_S
    assert said.startswith("host node1 has not answered for 8 s; ")
    wait_until(lambda: not leftovers(cluster, hosts=["node1"]), what="no rank on node1", timeout_s=GONE_WITHIN_S)
    assert time.monotonic() - cut < GONE_WITHIN_S
    assert waiting.ends(within_s=20) == 7
    assert waiting.stderr.startswith("error[R012]: host node1 was lost: ")
    assert not leftovers(cluster)


def test_ctrl_c_while_hosts_are_being_reached_leaves_at_once(cluster, ttlaunch_on, lab):  # noqa: F811 - the fixture
    cluster.silent_port("node1")
    lab(cluster.hostfile())
    process = ttlaunch_on(cluster).start("run --on lab --ranks 3 -- true")
    wait_until(
        lambda: any("sshd" in line and "root" in line for line in cluster.pids("node0").values()), what="a login"
    )
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=3)
    told = stderr.removeprefix("waiting for host node1\n")  # said after two seconds
    assert (process.returncode, stdout, told) == (130, "", "\ninterrupted\n")


def test_ctrl_c_lets_ranks_on_all_hosts_save_the_same_step_and_leave(cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811
    lab(cluster.hostfile())
    settings = "--set training_config.steps=5000 --set checkpoint_config.interval=5000"
    process = ttlaunch_on(cluster).start(f"run data_parallel --on lab {settings} --ranks 2")
    lines = []
    while not any("| step 1/5000 " in line for line in lines):
        lines.append(process.stdout.readline())
        assert lines[-1], (lines, process.stderr.read())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=40)
    assert process.returncode == 130, stderr
    assert stderr == "Ctrl-C: ranks finish their step and save it, within 30 s; Ctrl-C again leaves them 5 s\n"
    [report] = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/report.json")]
    assert {rank["step"] for rank in report["ranks"]} == {report["stopped"]["after_step"]}
    assert report["stopped"]["saved_step"] == report["stopped"]["after_step"]
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")
