"""Which engine a machine's runs are started by, and what is said where there is none."""

import pytest

from tests.engines.bash_engine import BashFinder
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.engines.choose import ENGINES, find_engine
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


def test_open_mpi_is_preferred():
    assert ["Open MPI", "MPICH", "Intel MPI"] == [finder.signature.title for finder in ENGINES]


def test_the_first_engine_that_the_machine_has_is_used(machine):
    assert "GNU bash 5.2.15" == find_engine(**machine(bash=BASH), engines=BOTH).name
    both = machine(bash=BASH, mpirun=MPI)
    assert "Open MPI 5.0.11" == find_engine(**both, engines=BOTH).name
    assert "GNU bash 5.2.15" == find_engine(**both, engines=BOTH[::-1]).name


def test_words_for_the_preferred_engine_go_to_no_other(machine):
    answer = find_engine(**machine(bash=BASH), engines=BOTH, gets_arguments=True)
    assert isinstance(answer, Diagnostic)
    assert answer.message == "no `mpirun` on this machine; nothing was started"


@pytest.mark.parametrize("order", [1, -1])
def test_a_machine_without_any_is_told_of_the_preferred_one(machine, order):
    answer = find_engine(**machine(), engines=BOTH[::order])
    assert answer.message == f"no `{BOTH[::order][0].signature.program}` on this machine; nothing was started"
