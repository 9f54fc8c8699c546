"""While all ranks are on this machine, nothing of a run listens on an address that another machine can reach."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running.conftest import start_run, until  # noqa: F401 - fixtures
from tests.security import forbidding
from tests.security.listeners import addresses_of, places_of
from ttlaunch import contract
from ttlaunch.agent.listeners import LOOPBACK, move_until_it_has_children
from ttlaunch.agent.run_processes import run_processes

pytestmark = pytest.mark.mpi

TALKS = """\
import os, pathlib, time
from mpi4py import MPI
values = MPI.COMM_WORLD.allgather(bytes(1_000_000))
pathlib.Path(f"part-{MPI.COMM_WORLD.rank}").write_text(str(sum(map(len, values))))
os.replace(f"part-{MPI.COMM_WORLD.rank}", f"up-{MPI.COMM_WORLD.rank}")
time.sleep(600)
"""
JOINS = """\
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(100_000))
pathlib.Path(f"part-{dist.get_rank()}").write_text(str(os.getpid()))
os.replace(f"part-{dist.get_rank()}", f"up-{dist.get_rank()}")
time.sleep(600)
"""
CONNECTS = """\
import os, socket, sys
os.setgid(65534); os.setuid(65534)
address, port = sys.argv[1:]
try:
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    connection.settimeout(1)
    connection.connect((address, int(port)))
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
OPEN_MPI_4 = Path("/usr/bin/mpirun")
WITHIN_S = 60


@pytest.fixture(params=["openmpi", "hydra"])
def interpreter(request):
    """The interpreter of an environment with each of the engines in turn."""
    return Path(sys.executable) if request.param == "openmpi" else request.getfixturevalue("mpich_python")


@pytest.mark.core
def test_a_run_of_a_program_listens_on_loopback_alone(here, start_run, interpreter):  # noqa: F811 - a fixture
    (here / "work.py").write_text(TALKS)
    run = start_run("work.py", "-n", "2", python=interpreter)
    assert {run.wait_for_file(f"up-{rank}") for rank in (0, 1)} == {"2000000"}
    listening = addresses_of([run.supervisor(), run.mpirun(), *run.processes()])
    assert listening, "the engine serves its ranks"
    assert [address for address in listening if not address.is_loopback] == []


@pytest.mark.parametrize("options", [(), ("--warm",)], ids=["cold", "warm"])
def test_a_run_of_a_script_listens_on_loopback_alone_and_only_in_its_ranks(here, start_run, options):  # noqa: F811
    (here / "work.py").write_text(JOINS)
    run = start_run(*options, "-n", "2", "work.py")
    ranks = {int(run.wait_for_file(f"up-{rank}")) for rank in (0, 1)}
    listening = addresses_of(ranks)
    assert listening, "torch's store and gloo wait for the other rank"
    assert [address for address in listening if not address.is_loopback] == []
    others = {run.supervisor(), run.mpirun(), *run.processes()} - ranks
    assert len(others) >= 4, "the supervisor, what starts the ranks, and two shims"
    assert addresses_of(others) == []


def test_a_run_of_a_recipe_with_a_process_group_of_torch_listens_on_loopback_alone(start_run, until):  # noqa: F811
    run = start_run("data_parallel", "-n", "2", "--set", "training_config.steps=100000")
    begun = '"kind": "step"'
    until(
        lambda: (
            run.run_folder
            and (path := run.run_folder / contract.progress_file(0)).is_file()
            and begun in path.read_text()
        ),
        within_s=WITHIN_S,
        what="a step is done",
    )
    listening = addresses_of([run.supervisor(), run.mpirun(), *run_processes(run.run_folder.name)])
    assert [address for address in listening if not address.is_loopback] == []


def test_a_run_says_once_that_its_sockets_cannot_be_moved_and_goes_on(here):
    (here / "work.py").write_text("from mpi4py import MPI\nassert MPI.COMM_WORLD.allreduce(1) == 2\n")
    words = [forbidding.__file__, sys.executable, "-m", "ttlaunch", "run", "work.py", "-n", "2"]
    run = subprocess.run(
        [sys.executable, *words], cwd=here, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("H041") == 1


def test_no_other_user_reaches_mpirun_once_the_ranks_of_a_recipe_have_found_each_other(
    start_run,  # noqa: F811 - a fixture
    until,  # noqa: F811 - a fixture
    skip_or_fail,
    interpreter,
):
    if os.geteuid():
        skip_or_fail("not root: no other user can be played here")
    run = start_run("data_parallel", "-n", "2", "--set", "training_config.steps=100000", python=interpreter)

    def last_step():
        path = run.run_folder and run.run_folder / contract.progress_file(0)
        return path and path.is_file() and sum(record["kind"] == "step" for record in run.records(0))

    until(last_step, within_s=WITHIN_S, what="a step is done")
    places = places_of([run.mpirun()])
    assert places, "mpirun goes on listening"
    assert "connected" not in [as_stranger(address, port) for address, port in places]
    steps = last_step()
    until(lambda: last_step() > steps, within_s=WITHIN_S, what="the ranks go on")
    os.kill(run.supervisor(), signal.SIGINT)
    assert run.ends(within_s=WITHIN_S) == contract.STATUS_INTERRUPTED


def as_stranger(address, port):
    """Try to connect as another user; returns how that ended."""
    words = [sys.executable, "-I", "-S", "-c", CONNECTS, address, port]
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=WITHIN_S, check=True
    ).stdout.strip()


@pytest.mark.parametrize("program", [Path(sys.executable).with_name("mpirun"), OPEN_MPI_4])
def test_both_generations_of_open_mpi_go_on_undisturbed_when_their_sockets_are_moved(tmp_path, skip_or_fail, program):
    if not program.is_file():
        skip_or_fail(f"no {program}")
    words = [str(program), "--oversubscribe", "-n", "2", "--bind-to", "none"]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOME": str(tmp_path)}
    script = f"touch {tmp_path}/up-$$; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 7"
    environment = {**allowed, "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    engine = subprocess.Popen(
        [*words, "sh", "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert move_until_it_has_children(engine.pid, LOOPBACK)
        deadline = time.monotonic() + WITHIN_S
        while len(list(tmp_path.glob("up-*"))) < 2:
            assert time.monotonic() < deadline
        listening = addresses_of([engine.pid])
        (tmp_path / "go").touch()
        _, said = engine.communicate(timeout=WITHIN_S)
    finally:
        engine.kill()
    assert len(listening) >= 2
    assert [address for address in listening if not address.is_loopback] == []
    assert engine.returncode == 7, "its own status, which the move did not take"
    assert b"accept" not in said
    assert b"signal" not in said
