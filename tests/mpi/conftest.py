"""Starts real ranks of a recipe under mpirun, without the launcher: writes the plan that they read, reads their records."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.running.report import combine_digests
from ttlaunch.spec.recipe.data import default_path, read_data
from ttlaunch.spec.recipe.importing import import_recipe_module

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
MPIRUN = Path(sys.executable).with_name("mpirun")

FORKED = Path(__file__).with_name("forked_ranks.py")

AS_RANK = """#!/bin/sh
# Stands in for the launcher's shim: says which rank this is.
export TTLAUNCH_RANK="$OMPI_COMM_WORLD_RANK"
exec "$@"
"""


class FinishedRun:
    """What the ranks of a run left behind."""

    def __init__(self, run_dir, process, roles):
        self.run_dir, self.process, self.roles = run_dir, process, roles
        self.output = process.stdout + process.stderr

    def records(self, rank, kind=None):
        path = self.run_dir / contract.progress_file(rank)
        records = [contract.read_record(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [record for record in records if kind in {None, record["kind"]}]

    def all_records(self, kind):
        return [record for rank in range(len(self.roles)) for record in self.records(rank, kind)]

    def error(self, rank):
        path = self.run_dir / contract.error_file(rank)
        return json.loads(path.read_text()) if path.exists() else None

    def by_step(self, kind, key):
        """The value of `key` that some rank other than a worker reported for each step."""
        values = {}
        for rank, role in enumerate(self.roles):
            if role != "worker":
                values |= {record["step"]: record[key] for record in self.records(rank, kind) if key in record}
        return values

    @property
    def digests(self):
        """Digest by parameter name, after checking that all holders agree."""
        found = defaultdict(set)
        for record in self.all_records(contract.KIND_PARAMETERS):
            for name, digest in record["digests"].items():
                found[name].add(digest)
        assert found, self.output
        assert {1} == {len(digests) for digests in found.values()}, "ranks hold different parameters"
        return {name: digests.pop() for name, digests in found.items()}

    @property
    def sha256(self):
        return combine_digests([self.digests])[0]


@pytest.fixture(scope="session")
def forker(tmp_path_factory):
    """`forker()`: the socket of a process that has imported torch and forks ranks, which importing it takes longer than to train."""
    with contextlib.ExitStack() as stack:

        @cache
        def start():
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttl-fork-"))) / "ranks"  # a short path
            command = [sys.executable, "-m", "tests.mpi.forked_ranks", "--serve", str(path)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}  # read when torch is imported
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE)  # its end ends the process
            )
            while not path.exists():
                assert process.poll() is None, "torch cannot be imported"
                time.sleep(0.01)
            return path

        yield start


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory, forker):
    """`run_ranks(recipe, roles, config, …)` runs to the end and returns what the ranks left behind."""

    def run(
        recipe,
        roles,
        config=None,
        *,
        data=None,
        start=None,
        mpirun_ranks=None,
        environment=None,
        timeout_s=120,
        before=None,
        forks=True,
    ):
        run_dir = tmp_path_factory.mktemp("run with space")
        plan = make_plan(recipe, roles, config or {}, data) | {"start": start}
        (run_dir / contract.PLAN_FILE).write_text(json.dumps(plan))
        if before:
            before()
        wrapper = run_dir / "as-rank"
        wrapper.write_text(AS_RANK)
        wrapper.chmod(0o755)
        as_fork = ["-I", "-S", str(FORKED), str(forker())] if forks else ["-m", "ttlaunch.runtime"]
        command = [str(wrapper), sys.executable, *as_fork]
        mca = ["--map-by", ":oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
        argv = [str(MPIRUN), *mca, "-n", str(mpirun_ranks or len(roles)), *command]
        process = subprocess.run(
            argv,
            cwd=run_dir,
            env=rank_environment(run_dir, len(roles)) | (environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return FinishedRun(run_dir, process, roles)

    return run


def rank_environment(run_dir, world_size):
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        contract.ENV_PLAN: str(run_dir / contract.PLAN_FILE),
        contract.ENV_RUN_DIR: str(run_dir),
        contract.ENV_WORLD_SIZE: str(world_size),
        contract.ENV_RUN_ID: "test",
    }


def make_plan(recipe, roles, config, data):
    folder = RECIPES / recipe if isinstance(recipe, str) else recipe
    declared = import_recipe_module(folder, "recipe").RECIPE
    resolved = declared.config.model_validate(config)
    data = data or (default_path(resolved) if declared.uses_data else None)
    corpus = read_data(data) if declared.uses_data else None
    return {
        "format": contract.PLAN_FORMAT,
        "hash": "test",
        "recipe": {"name": folder.name, "folder": str(folder)},
        "layout": "test",
        "world_size": len(roles),
        "ranks": [
            {"rank": rank, "host": "localhost", "slot": rank, "local_rank": rank, "role": role, "mesh_id": None}
            for rank, role in enumerate(roles)
        ],
        "flows": [],
        "config": resolved.model_dump(mode="json"),
        "data": corpus and {"path": data and str(data), "sha256": corpus.sha256, "bytes": len(corpus.text)},
    }
