"""What every engine has to do with real ranks; `test_conformance.py` puts each engine of `INSTALLED` through all of it.

The ranks are shell scripts: what they see and how they end depends on the engine, the shim and nothing else. A new engine
adds a line to `INSTALLED` and needs no test of its own for anything that is here.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.engines import bash_engine
from tests.running.conftest import StartedRun, wait_until
from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.engines.base import Capability
from ttlaunch.engines.choose import ENGINES, find_engine
from ttlaunch.planning.engine import RanksToStart
from ttlaunch.planning.launch_plan import RankRow

NASTY = """it's a "$HOME" `id`; {x} \\ * and
a second line"""
GARBAGE = bytes(range(256)) * 40  # more than a pipe takes at once is in `FLOOD`
FLOOD = b"x" * 300_000 + b"\nand no line end"
ROWS = tuple(RankRow(rank, f"box-{rank // 2}", rank % 2, "worker") for rank in range(4))
SLOTS = (("box-0", 2), ("ann@box-1", 2))

WAIT = """
echo $$ > part-$TTLAUNCH_RANK && mv part-$TTLAUNCH_RANK up-$TTLAUNCH_RANK
while :; do sleep 0.1; done
"""
"""Says that it is up, and waits to be ended."""

OBEY = "trap 'touch told-$TTLAUNCH_RANK; exit 0' TERM" + WAIT


ABORTS = """
import time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    time.sleep(0.3)
    MPI.COMM_WORLD.Abort(3)
time.sleep(600)
"""
MEETS = """
import os, time
from mpi4py import MPI
sum_of_ranks = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)
rank = os.environ["TTLAUNCH_RANK"]
files = {line.split()[5] for line in open("/proc/self/maps") if "segment." in line or "mpich_shm_" in line}
with open(f"part-{rank}", "w") as file:
    file.write(f"{sum_of_ranks} {os.environ['TTLAUNCH_SCRATCH']} {' '.join(files)}")
os.replace(f"part-{rank}", f"up-{rank}")
time.sleep(600)
"""
"""Ranks that meet through MPI, say where the memory lies that they share, and wait to be ended."""


@dataclass(frozen=True)
class Installed:
    """An engine as the tests find it on this machine.

    Attributes:
        folder: That has its command; None: beside the interpreter of the tests, or that of `wheel`.
        key: The name by which `--engine` chooses it.
        name: How its name begins, so that no test passes with another version by mistake.
        libraries: The MPI that its ranks have to load, where it is not the one that mpi4py finds; the first that exists.
        file: Of an engine that is no part of the package: it is added to a copy.
        wheel: The fixture that returns the interpreter of an environment with the engine's wheel.
    """

    folder: Path | None
    key: str
    name: str
    libraries: tuple[str, ...] = ()
    file: Path | None = None
    wheel: str | None = None


_OF_DEBIAN = tuple(f"/usr/lib/{machine}-linux-gnu/libmpi.so.40" for machine in ("x86_64", "aarch64"))
INSTALLED = {
    "open-mpi-5": Installed(None, "openmpi", "Open MPI 5."),
    "open-mpi-4": Installed(Path("/usr/bin"), "openmpi", "Open MPI 4.", _OF_DEBIAN),
    "mpich": Installed(None, "hydra", "MPICH 5.", wheel="mpich_python"),
    "agents": Installed(None, "agents", "agents"),
    "bash": Installed(None, "bash", "GNU bash ", file=Path(bash_engine.__file__)),
}
TEMPORARY = "temporary files"
SET_BY_TESTS = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""What `tests/conftest.py` sets for every mpirun; an engine has to find a place for its files without."""


class Bench:
    """A place to start runs with one engine."""

    def __init__(self, folder, python, environment, engine, key):
        self.folder, self.engine, self.key = folder, engine, key
        self._python, self._environment = python, environment
        self.runs = []

    def start(self, script, *, ranks=2, environment=None, name="work.sh"):
        """Start a script on every rank: of the shell's, or of Python's where its name says so."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        given = {**self._environment, **(environment or {})}
        arguments = ["--engine", self.key, "-n", str(ranks), name]
        self.runs.append(StartedRun(self.folder, arguments, python=self._python, environment=given))
        return self.runs[-1]

    def up(self, run, ranks):
        """Wait until so many ranks are up; their process ids."""
        return [int(run.wait_for_file(f"up-{rank}")) for rank in range(ranks)]


@pytest.fixture(scope="session")
def package_with_bash(tmp_path_factory):
    """A folder with a copy of the package that has one engine more: its file, and its line of registration."""
    folder = tmp_path_factory.mktemp("package")
    package = folder / "ttlaunch"
    shutil.copytree(Path(contract.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("configurations", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(bash_engine.__file__, package / "engines")
    registration = package / "engines/choose.py"
    text = registration.read_text()
    added = text.replace("(OpenMpiFinder(), ", "(OpenMpiFinder(), BashFinder(), ")
    assert added != text
    line = "from ttlaunch.engines.bash_engine import BashFinder\n"
    registration.write_text(
        added.replace("from ttlaunch.engines.base import", line + "from ttlaunch.engines.base import")
    )
    return folder


IN_FULL = ("open-mpi-5", "agents")
"""The engines that most runs use; the others are put through eight cases, and through all by `benchmarks/conformance.py`."""
EIGHT = {
    "test_every_rank_runs_once_and_knows_who_it_is",
    "test_a_value_reaches_the_ranks_whatever_it_holds",
    "test_logs_hold_what_ranks_print_byte_for_byte",
    "test_ranks_meet_in_one_world_and_what_they_share_goes_with_a_killed_engine",
    "test_a_rank_that_exits_is_named_and_the_others_are_ended",
    "test_a_rank_that_is_killed_is_named_first",
    "test_a_signal_to_the_launcher_lets_ranks_end_in_their_own_way",
    "test_the_engine_does_not_outlive_a_killed_supervisor",
}
PLANS = {
    "test_the_engine_of_the_machine_is_recognised_by_its_signature",
    "test_equal_ranks_give_equal_commands_of_a_length_that_does_not_grow",
}
"""The tests that start nothing."""


def pytest_generate_tests(metafunc):
    """Give each test the engines that it is for."""
    if "bench" in metafunc.fixturenames:
        is_for_all = metafunc.function.__name__ in EIGHT | PLANS
        engines = [name for name in INSTALLED if is_for_all or name in IN_FULL]
        metafunc.parametrize("bench", engines, indirect=True)


@pytest.fixture
def bench(request, here, bare_python, skip_or_fail):
    """A `Bench` for every engine of `INSTALLED` in turn."""
    installed = INSTALLED[request.param]
    if installed.folder is None and installed.wheel is None:
        python, environment = Path(sys.executable), dict(os.environ)
    elif installed.wheel is not None:
        python, environment = request.getfixturevalue(installed.wheel), dict(os.environ)
    else:
        python, environment = bare_python()
        environment["PATH"] = f"{installed.folder}:/bin"
    library = next((path for path in installed.libraries if Path(path).is_file()), None)
    environment |= {"MPI4PY_LIBMPI": library} if library else {}
    environment = {name: value for name, value in environment.items() if name not in SET_BY_TESTS}
    (here / TEMPORARY).mkdir()
    environment["TMPDIR"] = str(here / TEMPORARY)
    engines = [finder for finder in ENGINES if finder.key == installed.key]
    if installed.file is not None:
        environment["PYTHONPATH"] = str(request.getfixturevalue("package_with_bash"))
        engines = [bash_engine.BashFinder()]
    found = find_engine(python=str(python), search_path=environment.get("PATH"), engines=engines)
    if isinstance(found, Diagnostic) or not found.name.startswith(installed.name):
        skip_or_fail(f"no {installed.name} on this machine")
    made = Bench(here, python, environment, found, installed.key)
    yield made
    for run in made.runs:
        run.close()


def assert_nothing_is_left(run):
    """No process, no folder in shared memory, and no temporary file of the engine's.

    Other tests may run at the same time on this machine, so only what belongs to this run is looked at: without a word of
    ours, its engine would put temporary files where `TMPDIR` points, and those in shared memory are looked at in the test
    of what ranks share.
    """
    assert [] == run.processes()
    assert [] == run.scratch_folders()
    assert [] == list((run.folder / TEMPORARY).iterdir())


# What it plans.


def test_the_engine_of_the_machine_is_recognised_by_its_signature(bench):
    engine = bench.engine
    assert engine.name.startswith(engine.signature.title)
    version = engine.signature.version_in(engine.version_output)
    assert engine.signature.refusal(version) is None
    said = subprocess.run([engine.program, "--version"], capture_output=True, text=True, check=True).stdout
    assert version == engine.signature.version_in(said)
    assert engine.signature.version_in("HYDRA build details:") is None


def test_equal_ranks_give_equal_commands_of_a_length_that_does_not_grow(bench):
    ranks = RanksToStart("/env/bin/python", "/ttlaunch/shim.py", ROWS, SLOTS)
    command = bench.engine.command(ranks)
    assert command == bench.engine.command(ranks)
    assert (bench.engine.name, bench.engine.program) == (command.name, command.argv[0])
    assert len(command.argv) == len(bench.engine.command(RanksToStart("p", "s", ROWS * 50, SLOTS)).argv)
    assert all(command.names.rank_variables)
    assert command.names.launcher


# Ranks, their environment and what they print.


@pytest.mark.core
def test_every_rank_runs_once_and_knows_who_it_is(bench):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE", "HOST", "RUN_ID"]
    values = " ".join(f'"$TTLAUNCH_{name}"' for name in names)
    run = bench.start(f'printf "%s|" {values} >> seen-$TTLAUNCH_RANK; pwd >> seen-$TTLAUNCH_RANK', ranks=3)
    assert (0, "") == (run.ends(within_s=60), run.stderr)
    plan = json.loads((run.run_folder / contract.PLAN_FILE).read_text())
    assert plan["engine"]["name"] == bench.engine.name
    for rank in range(3):
        expected = f"{rank}|{rank}|3|rank|localhost|{run.run_folder.name}|{bench.folder}\n"
        assert expected == (bench.folder / f"seen-{rank}").read_text()
    assert_nothing_is_left(run)


def test_a_value_reaches_the_ranks_whatever_it_holds(bench):
    given = {"TT_NASTY": NASTY, "TT_EMPTY": "", "PASSED_BY_THE_ENGINE": "no contract says so"}
    run = bench.start('printf "%s|%s|" "$TT_NASTY" "${TT_EMPTY-unset}" > seen-$TTLAUNCH_RANK', environment=given)
    assert run.ends(within_s=60) == 0
    assert [f"{NASTY}||"] * 2 == [(bench.folder / f"seen-{rank}").read_text() for rank in range(2)]


def test_logs_hold_what_ranks_print_byte_for_byte(bench):
    (bench.folder / "garbage").write_bytes(GARBAGE)
    (bench.folder / "flood").write_bytes(FLOOD)
    run = bench.start("cat garbage & cat flood >&2; wait", ranks=3)
    assert run.ends(within_s=60) == 0
    for rank in range(3):
        assert (run.run_folder / contract.stdout_file(rank)).read_bytes() == GARBAGE
        assert (run.run_folder / contract.stderr_file(rank)).read_bytes() == FLOOD


def test_ranks_meet_in_one_world_and_what_they_share_goes_with_a_killed_engine(bench):
    if Capability.MPI not in bench.engine.can:
        pytest.skip("its ranks do not meet through MPI")
    run = bench.start(MEETS, name="work.py")
    said = [run.wait_for_file(f"up-{rank}").split() for rank in range(2)]
    assert ["3", "3"] == [total for total, *_ in said]
    shared = {Path(path) for _, _, *files in said for path in files}
    assert shared
    assert all(path.exists() for path in shared)
    (scratch,) = {Path(scratch) for _, scratch, *_ in said}
    elsewhere = {path.name for path in shared if not path.is_relative_to(scratch)}

    def noted():
        return elsewhere <= {path.name for path in scratch.glob("segments/*")}

    wait_until(noted, within_s=10, what="the run's folder has the names of the files that lie elsewhere")
    os.kill(run.mpirun(), signal.SIGKILL)
    assert run.ends(within_s=30) == 1
    assert not any(path.exists() for path in shared)
    assert_nothing_is_left(run)


# How it ends.


@pytest.mark.parametrize("status", [3, 255])
def test_a_rank_that_exits_is_named_and_the_others_are_ended(bench, status):
    run = bench.start(f"[ $TTLAUNCH_RANK = 1 ] && exit {status}; {WAIT}", ranks=3)
    assert run.ends(within_s=60) == 1
    failure = run.report["failure"]
    assert ("R003", 1, f"exited with status {status}") == (failure["code"], failure["rank"], failure["cause"])
    assert [0, 2] == sorted(one["rank"] for one in failure["cascade"])
    assert run.report["duration_s"] < 15
    assert_nothing_is_left(run)


def test_a_rank_that_ends_with_0_ends_no_other(bench):
    run = bench.start("[ $TTLAUNCH_RANK = 1 ] || sleep 1; touch end-$TTLAUNCH_RANK", ranks=3)
    assert (0, None) == (run.ends(within_s=60), run.report["failure"])
    assert ["end-0", "end-1", "end-2"] == sorted(path.name for path in bench.folder.glob("end-*"))


def test_ranks_that_ignore_the_order_to_end_are_killed_after_a_failure(bench):
    run = bench.start(f"trap '' TERM; [ $TTLAUNCH_RANK = 1 ] && {{ sleep 0.5; exit 3; }}; {WAIT}", ranks=3)
    assert run.ends(within_s=30) == 1
    assert ("R003", 1) == (run.report["failure"]["code"], run.report["failure"]["rank"])
    assert_nothing_is_left(run)


def test_variables_of_a_surrounding_mpirun_do_not_reach_ranks_without_mpi(bench):
    if Capability.MPI in bench.engine.can or bench.key == "bash":
        pytest.skip("its ranks have variables of MPI")
    outer = {"OMPI_COMM_WORLD_RANK": "7", "PMIX_RANK": "7", "PMI_RANK": "7", "OMPI_MCA_btl": "tcp"}
    run = bench.start("env | grep -E '^(OMPI|PMIX?|PRTE|OPAL)_' > seen-$TTLAUNCH_RANK; true", environment=outer)
    assert run.ends(within_s=60) == 0
    assert ["", ""] == [(bench.folder / f"seen-{rank}").read_text() for rank in range(2)]


def test_a_rank_that_aborts_mpi_is_named_and_the_others_are_ended(bench):
    if Capability.MPI not in bench.engine.can:
        pytest.skip("its ranks do not meet through MPI")
    run = bench.start(ABORTS, ranks=3, name="work.py")
    assert run.ends(within_s=60) == 1
    failure = run.report["failure"]
    assert ("R003", 1, "exited with status 3") == (failure["code"], failure["rank"], failure["cause"])
    assert [0, 2] == sorted(one["rank"] for one in failure["cascade"])
    assert_nothing_is_left(run)


@pytest.mark.core
def test_a_rank_that_is_killed_is_named_first(bench):
    run = bench.start(WAIT, ranks=3)
    os.kill(bench.up(run, 3)[2], signal.SIGKILL)
    assert run.ends(within_s=30) == 1
    failure = run.report["failure"]
    assert ("R004", 2, "was killed by SIGKILL") == (failure["code"], failure["rank"], failure["cause"])
    assert_nothing_is_left(run)


def test_a_killed_shim_is_named(bench):
    run = bench.start(WAIT, ranks=2)
    bench.up(run, 2)
    progress = run.run_folder / contract.progress_file(1)
    wait_until(lambda: progress.is_file() and progress.read_text(), within_s=10, what="the shim's first record")
    os.kill(run.records(1)[0]["shim_pid"], signal.SIGKILL)
    assert run.ends(within_s=30) == 1
    assert ("R006", 1) == (run.report["failure"]["code"], run.report["failure"]["rank"])
    assert_nothing_is_left(run)


def test_a_killed_engine_is_named_and_no_rank_is(bench):
    run = bench.start(WAIT, ranks=2)
    bench.up(run, 2)
    os.kill(run.mpirun(), signal.SIGKILL)
    assert run.ends(within_s=30) == 1
    launcher = bench.engine.signature.program
    failure = run.report["failure"]
    assert ("R008", None) == (failure["code"], failure["rank"])
    assert failure["cause"] == f"{launcher} was killed by SIGKILL; no rank had failed"
    assert_nothing_is_left(run)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_lets_ranks_end_in_their_own_way(bench, number, status):
    run = bench.start(OBEY, ranks=3)
    bench.up(run, 3)
    run.process.send_signal(number)
    assert run.ends(within_s=30) == status
    assert sorted(path.name for path in bench.folder.glob("told-*")) == ["told-0", "told-1", "told-2"]
    assert run.report["failure"] is None
    assert_nothing_is_left(run)


def test_what_a_rank_leaves_behind_is_ended(bench):
    run = bench.start("setsid sleep 600 > /dev/null 2>&1 &\necho $! > sleeper-$TTLAUNCH_RANK; sleep 0.2")
    assert run.ends(within_s=30) == 0
    assert run.report["leftovers"] == 2
    assert not any(Path("/proc", (bench.folder / f"sleeper-{rank}").read_text().strip()).exists() for rank in (0, 1))
    assert_nothing_is_left(run)


def test_the_engine_does_not_outlive_a_killed_supervisor(bench):
    run = bench.start(WAIT, ranks=2)
    bench.up(run, 2)
    os.kill(run.supervisor(), signal.SIGKILL)
    assert run.ends(within_s=30) != 0
    wait_until(lambda: not run.processes() and not run.scratch_folders(), within_s=30, what="nothing is left")
