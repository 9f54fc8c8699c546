"""How tests make a plan: the description is read as the command line reads it, the machine is a made-up one."""

import dataclasses
import os
from pathlib import Path

import pytest

from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import render
from ttlaunch.engines.openmpi import OpenMpi, generation_of
from ttlaunch.planning.launch_plan import CommandProgram
from ttlaunch.planning.make import Surroundings, plan_command
from ttlaunch.planning.recipe_plan import plan_recipe
from ttlaunch.spec.topology.load import load_topology

SURROUNDINGS = Surroundings(
    working_folder=Path("/home/ann/project"),
    shell={"HOME": "/home/ann", "PATH": "/usr/bin"},
    python="/opt/venv/bin/python",
    shim="/opt/ttlaunch/shim.py",
    engine=OpenMpi("/opt/venv/bin/mpirun", (5, 0, 11), generation_of((5, 0, 11))),
)


@pytest.fixture
def cluster(tmp_path, write_cluster):
    """`cluster(links, meshes=…, slots=…)` is the `Topology` of these meshes and links."""

    def make(links, **parts):
        folder = write_cluster(tmp_path / "cluster", links, **parts)
        loaded = load_topology(folder, name="cluster", environment={}, working_folder=tmp_path)
        assert loaded.topology is not None, render(loaded.diagnostics)
        return loaded.topology

    return make


@pytest.fixture
def plan(here, monkeypatch):
    """`plan("recipe", on=…, …)` is the `LaunchPlan` on a made-up machine."""

    def make(target, *, surroundings=None, shell=None, **request):
        given = {"HOME": "/home/ann", **(shell or {})}
        with monkeypatch.context() as environment:
            for name in list(os.environ):
                environment.delenv(name)
            for name, value in given.items():
                environment.setenv(name, value)
            description = resolve(RunSpec(target=target, **request), working_folder=here)
        assert description.ok, render(description.diagnostics)
        around = dataclasses.replace(SURROUNDINGS, **(surroundings or {}))
        if description.command is not None:
            program = CommandProgram(description.name, ("./work.py",))
            return plan_command(program, description.topology, around, ranks=request.get("ranks"))
        return plan_recipe(description.choice, description.layout, description.topology, surroundings=around)

    return make
