"""What listens on the machines of a run: the chosen network and the loopback interface, and nothing beyond."""

import ipaddress
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import LAUNCHER, PROGRAMS
from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab  # noqa: F401 - a fixture
from tests.security.listeners import addresses_of, places_of
from tests.security.test_listening import CONNECTS

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

MEETS_TWICE = """\
import pathlib, time
from mpi4py import MPI
world = MPI.COMM_WORLD
world.sendrecv(bytes(100_000), dest=(world.rank + 1) % world.size, source=(world.rank - 1) % world.size)
print("up", world.rank, flush=True)
while not pathlib.Path("/root/go").exists():
    time.sleep(0.05)
print("sum", sum(map(len, world.alltoall([bytes(100_000)] * world.size))), world.rank, flush=True)
world.Barrier()
"""
MEETS_WITHOUT_MPI4PY = """\
import ctypes, os, pathlib, time
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
print("up", os.environ["TTLAUNCH_RANK"], flush=True)
while not pathlib.Path("/root/go").exists():
    time.sleep(0.05)
assert mpi.MPI_Barrier(ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))) == 0
mpi.MPI_Finalize()
"""
OF_MPI = ("prted", "orted", "work.py")
"""In the command lines of daemons, and of ranks."""


@pytest.fixture
def started(make_cluster, lab, tmp_path):  # noqa: F811 - a fixture
    """`started(script, …)`: starts a script with a rank on each of four hosts, or `hosts`; returns the cluster, the run and what it prints."""
    runs = []

    def start(script, *words, command, environment, hosts=4, **settings):
        cluster = make_cluster(hosts=hosts, networks=2)
        lab(cluster.hostfile(), **settings)
        (tmp_path / "work.py").write_text(script)
        with (tmp_path / "printed").open("wb") as file:
            runs.append(
                cluster.popen(
                    LAUNCHER,
                    [*command, "run", "--on", "lab", "--ranks", str(hosts), *words, "work.py"],
                    cwd=tmp_path,
                    env=cluster.environment(LAUNCHER) | {"COLUMNS": "160"} | environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return cluster, runs[-1], tmp_path / "printed"

    yield start
    for run in runs:
        run.terminate()
        run.wait(60)


def listens_on_the_chosen_network_alone(cluster, run, printed):
    """Check the sockets of all machines, and that ranks that have not met before find each other."""
    wait_until(
        lambda: all(f"up {rank}" in printed.read_text() for rank in range(4)) or run.poll() is not None,
        what="all ranks use MPI",
        timeout_s=60,
    )
    assert run.poll() is None, printed.read_text()
    machines = (LAUNCHER, *cluster.hosts)
    wait_until(lambda: not any(beyond(cluster, name) for name in machines), what="no socket is open to other networks")
    for host in cluster.hosts:
        processes = {pid: words for pid, words in cluster.pids(host).items() if "sshd" not in words}
        of_mpi = [pid for pid, words in processes.items() if any(name in words for name in OF_MPI)]
        assert any("shim.py" in words for words in processes.values()), processes
        assert addresses_of(processes.keys() - of_mpi) == [], "agents and shims do not listen"
        own = ipaddress.ip_address(cluster.ip(host))
        assert addresses_of(of_mpi).count(own) == 2, "one of the daemon, one of the rank"
        cluster.path(host, "/root/go").touch()
    assert run.wait(60) == 0, printed.read_text()
    assert "refused" not in printed.read_text()
    assert "accept" not in printed.read_text()


def test_daemons_and_ranks_listen_on_the_chosen_network_alone_and_still_find_each_other(started):
    command = [sys.executable, "-m", "ttlaunch"]
    listens_on_the_chosen_network_alone(*started(MEETS_TWICE, command=command, environment={}))


def test_daemons_and_ranks_of_open_mpi_4_listen_on_the_chosen_network_alone(started, bare_python, skip_or_fail):
    if not Path("/usr/bin/orted").exists():
        skip_or_fail("no Open MPI 4 in /usr/bin")
    python, environment = bare_python()
    changed = {"PYTHONPATH": environment["PYTHONPATH"], "PATH": PROGRAMS}
    settings = {"python": "/usr/bin/python3", "mpi_prefix": "/usr"}
    words = ["--", "/usr/bin/python3"]
    command = [python, "-m", "ttlaunch"]
    run = started(MEETS_WITHOUT_MPI4PY, *words, command=command, environment=changed, **settings)
    listens_on_the_chosen_network_alone(*run)


MEETS_OVER_TORCH = """\
import pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(100_000))
print("up", dist.get_rank(), flush=True)
while not pathlib.Path("/root/go").exists():
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("options", [(), ("--warm",)], ids=["cold", "warm"])
def test_of_a_script_only_its_ranks_listen_and_on_the_chosen_network_alone(started, options):
    command = [sys.executable, "-m", "ttlaunch"]
    cluster, run, printed = started(MEETS_OVER_TORCH, *options, command=command, environment={}, hosts=2)
    wait_until(
        lambda: all(f"up {rank}" in printed.read_text() for rank in range(2)) or run.poll() is not None,
        what="all ranks have met",
        timeout_s=120,
    )
    assert run.poll() is None, printed.read_text()
    for number, host in enumerate(cluster.hosts):
        processes = [pid for pid, words in cluster.pids(host).items() if "sshd" not in words]
        [rank] = [pid for pid in processes if Path(f"/proc/{parent_of(pid)}/comm").read_text() == "ttlaunch-shim\n"]
        own, places = ipaddress.ip_address(cluster.ip(host)), places_of([rank])
        assert {own} == {address for address, _ in places}, "gloo, and torch's store on the first host"
        assert (len(places) > 1) == (number == 0), places
        assert addresses_of({*processes} - {rank}) == [], "agents, what starts ranks, and shims do not listen"
    assert addresses_of([pid for pid, words in cluster.pids(LAUNCHER).items() if "sshd" not in words]) == []
    for host in cluster.hosts:
        cluster.path(host, "/root/go").touch()
    assert run.wait(60) == 0, printed.read_text()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_no_other_user_reaches_mpi_once_the_ranks_of_a_recipe_have_found_each_other(
    make_cluster,
    ttlaunch_on,
    lab,  # noqa: F811 - a fixture
    tmp_path,
):
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile())
    printed = tmp_path / "printed"
    with printed.open("wb") as file:
        words = "run data_parallel --on lab --set multihost_config.num_workers=2 --set training_config.steps=100000"
        run = ttlaunch_on(cluster).start(words, stdout=file, stderr=subprocess.STDOUT)

    def reached():
        """How another user's attempts to reach daemons end, on every machine."""
        found = set()
        for name in (LAUNCHER, *cluster.hosts):
            of_mpi = [pid for pid, words in cluster.pids(name).items() if re.search("prterun|prted", words)]
            places = places_of(of_mpi)
            assert len(places) >= 3, "they go on listening"
            for address, port in places:
                stranger = cluster.run(name, [sys.executable, "-I", "-S", "-c", CONNECTS, str(address), str(port)])
                found.add(stranger.stdout.strip() or stranger.stderr)
        return found

    def steps():
        return sum(
            path.read_text().count('"kind": "step"') for path in tmp_path.glob("runs/*/records/rank-0.progress.jsonl")
        )

    try:
        wait_until(
            lambda: steps() or (run.poll() is not None and pytest.fail(printed.read_text())),
            what="a step is done",
            timeout_s=60,
        )
        wait_until(lambda: reached() == {"TimeoutError"}, what="no daemon answers")
        before = steps()
        wait_until(lambda: steps() > before, what="the ranks go on")
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, printed.read_text()
    finally:
        run.terminate()
        run.wait(60)


def beyond(cluster, name):
    """The addresses of a machine's processes, but for sshd, that neither the first network nor loopback has."""
    own = ipaddress.ip_address(cluster.ip(name))
    processes = [pid for pid, words in cluster.pids(name).items() if "sshd" not in words]
    return [address for address in addresses_of(processes) if not address.is_loopback and address != own]
