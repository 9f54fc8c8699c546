"""Which engine a machine's runs are started by, and what is said where there is none."""

import json
import re

import pytest

from tests.engines.bash_engine import BashFinder
from ttlaunch.engines.choose import ENGINES, engine_named, find_engine, suitable_engines
from ttlaunch.engines.openmpi import OpenMpiFinder


@pytest.fixture
def machine(tmp_path):
    """`machine(mpirun="mpirun (Open MPI) 5.0.11", bash=…)`: a search path with programs that answer so to `--version`."""

    def make(**programs):
        for name, says in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
            (tmp_path / name).chmod(0o755)
        return {"python": str(tmp_path / "none/python"), "search_path": str(tmp_path)}

    return make


BOTH = (OpenMpiFinder(), BashFinder())
MPI, BASH = "mpirun (Open MPI) 5.0.11", "GNU bash, version 5.2.15(1)-release"


def test_engines_have_names_by_which_an_option_chooses_them():
    assert ["openmpi", "hydra", "agents"] == [finder.key for finder in ENGINES]
    assert all(finder.can == finder.never_started().can for finder in ENGINES)
    assert all(finder is engine_named(finder.key) for finder in ENGINES)
    assert "did you mean `agents`?" in engine_named("agent").hints
    assert "`--on slurm:PARTITION` runs on hosts that Slurm gives" in engine_named("slurm").hints[0]


def test_the_first_engine_that_the_machine_has_is_used(machine):
    assert "GNU bash 5.2.15" == find_engine(**machine(bash=BASH), engines=BOTH).name
    both = machine(bash=BASH, mpirun=MPI)
    assert "Open MPI 5.0.11" == find_engine(**both, engines=BOTH).name
    assert "GNU bash 5.2.15" == find_engine(**both, engines=BOTH[::-1]).name


def test_programs_that_use_mpi_get_another_engine_than_those_that_do_not():
    assert ["openmpi", "hydra"] == [finder.key for finder in suitable_engines(uses_mpi=True)]
    assert ["agents"] == [finder.key for finder in suitable_engines(uses_mpi=False)]


@pytest.mark.parametrize("order", [1, -1])
def test_a_machine_without_any_is_told_of_the_preferred_one(machine, order):
    answer = find_engine(**machine(), engines=BOTH[::order])
    assert answer.message == f"no `{BOTH[::order][0].signature.program}` on this machine; nothing was started"


@pytest.fixture
def written(here):
    """Three programs: one that names no MPI, one that imports mpi4py, and one that imports the second."""
    for name, text in {"plain.py": "", "talk.py": "import mpi4py\n", "calls.py": "import talk\n"}.items():
        (here / name).write_text(text)


@pytest.mark.parametrize(
    ("arguments", "engine", "note"),
    [
        ("plain.py", "agents", "; the program does not name MPI and runs without it"),
        ("talk.py", "Open MPI", "; `talk.py` names mpi4py, so it gets MPI"),
        ("calls.py", "Open MPI", "; `talk.py` names mpi4py, so it gets MPI"),
        ("--engine agents talk.py", "agents", "; engine `agents` has no MPI, although `talk.py` names mpi4py"),
        ("--engine openmpi plain.py", "Open MPI", "; engine `openmpi` gives them MPI"),
        ("--mpi-args '--tag-output' plain.py", "Open MPI", "; the program does not name MPI and runs without it"),
        ("-- hostname", "Open MPI", None),
        ("--engine agents -- hostname", "agents", None),
    ],
)
def test_the_program_decides_which_engine_starts_it_unless_an_option_does(ttlaunch, written, arguments, engine, note):
    answer = ttlaunch(f"plan -n 2 {arguments}")
    assert answer.status == 0, answer.stderr
    assert f"2 ranks on 1 host, {engine}" in answer.stdout
    notes = [line for line in answer.stdout.splitlines() if line.startswith("note  ranks get the variables")]
    expected = f"note  ranks get the variables that torchrun sets, such as RANK and MASTER_ADDR{note}"
    assert ([expected] if note is not None else []) == notes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "--engine agents sync_ps",
            "error[P057]: the recipe exchanges its messages by MPI, which engine `agents` does not have",
        ),
        (
            "--engine openmpi sync_ps --set multihost_config.socket_type=grpc",
            "error[P057]: the recipe exchanges its messages by gRPC, and engine `openmpi` starts ranks that use MPI",
        ),
        ("--engine agents --mpi-args '-x A' plain.py", "error[P058]: `--mpi-args` has arguments for mpirun"),
        (
            "--engine agent plain.py",
            "error[P009]: there is no engine `agent`; `openmpi`, `hydra` or `agents` was expected",
        ),
        ("--warm --engine openmpi plain.py", "error[P070]: `--warm` forks ranks from one process, and Open MPI"),
        ("--warm talk.py", "error[P070]: `--warm` forks ranks from one process, and Open MPI"),
        ("--warm sync_ps", "error[P070]: `--warm` forks ranks from one process, and Open MPI"),
    ],
)
def test_an_engine_that_cannot_do_what_is_asked_is_refused(ttlaunch, written, arguments, expected):
    answer = ttlaunch(f"plan -n 2 {arguments}")
    assert (2, expected) == (answer.status, answer.stderr[: len(expected)])


def test_the_examples_of_the_pages_about_engines_end_as_they_say(ttlaunch, written, here):
    (here / "train.py").write_text("")
    for code, line in {
        "P057": "plan --engine agents sync_ps",
        "P058": "plan --engine agents --mpi-args '-x PATH' train.py",
        "P070": "plan data_parallel --ranks 2 --warm",
    }.items():
        assert f"ttlaunch {line}\n" in ttlaunch(f"explain {code}").stdout
        answer = ttlaunch(line)
        assert (2, True) == (answer.status, answer.stderr.startswith(f"error[{code}]: "))


def test_a_program_that_is_no_python_starts_without_the_warm_process_and_the_user_is_warned(ttlaunch, written):
    line = "plan --warm --engine agents -- ls"
    assert f"ttlaunch {line}\n" in ttlaunch("explain P071").stdout
    answer = ttlaunch(line)
    warning = "warning[P071]: `--warm` has no effect: ls is no Python program, so each rank starts by itself"
    assert (0, True) == (answer.status, warning in answer.stderr)


def test_a_program_that_is_no_python_is_not_refused_for_the_warm_process_that_an_engine_with_mpi_lacks(
    ttlaunch, written
):
    answer = ttlaunch("plan --warm -n 2 -- ls")
    assert (0, ["P071"]) == (answer.status, re.findall(r"\[(P\d+)\]", answer.stderr))


def test_a_script_that_is_not_there_is_all_there_is_to_say_about_forked_ranks(ttlaunch):
    answer = ttlaunch("plan --warm -n 2 absent.py")
    assert (2, ["P009"]) == (answer.status, re.findall(r"\[(P\d+)\]", answer.stderr))


def test_a_plan_keeps_that_its_ranks_are_forked_from_a_warm_process(ttlaunch, written):
    plans = [json.loads(ttlaunch(f"plan -n 2 --format json {option} plain.py").stdout) for option in ("", "--warm")]
    assert [None, True] == [plan.get("warm") for plan in plans]


def test_a_machine_without_mpirun_plans_scripts_and_says_how_to_start_other_programs(
    ttlaunch, written, monkeypatch, tmp_path
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/hostname").symlink_to("/bin/hostname")
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "2 ranks on 1 host, agents" in ttlaunch("plan -n 2 plain.py").stdout
    refused = ttlaunch("plan -n 2 -- hostname").stderr
    assert refused.startswith("error[H001]: no `mpirun` on this machine")
    assert "hint: `--engine agents` starts a program that does not use MPI\n" in refused
    assert "--engine agents" not in ttlaunch("plan -n 2 talk.py").stderr
