"""Hosts that `ttlaunch prepare` has made ready for real ranks: bare hosts, prepared once for all tests that run there.

Their environments take a minute of a processor, so all these tests are in one file, which one process of pytest runs.

The launcher of a test cluster has no way to the outside, so the wheels are collected before, as the guide for launching
machines without a network says.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.command import CommandLine
from tests.cluster.hosts import Cluster
from ttlaunch.hosts.prepare.requirements import rank_requirements

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
PREPARE = f"prepare --on lab --constraints {CONSTRAINTS}"
_PREPARE_S = 600


@pytest.fixture(scope="session")
def wheels_for_ranks(tmp_path_factory):
    """Variables with which pip finds torch and all else that ranks need, in the versions of constraints.txt."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    subprocess.run([*pip, "--constraint", CONSTRAINTS, "--dest", folder, *rank_requirements()], check=True)
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": folder.as_uri(),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_EXTRA_INDEX_URL": "",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }


@pytest.fixture(scope="session")
def prepared_cluster(_hosts_can_start, wheels_for_ranks, tmp_path_factory):
    """The hosts node0 and node1 without a window to this machine's Python environment, each with one of its own."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "lab").mkdir()
    with Cluster(hosts=2, share=(sys.base_prefix,), size_mb=8192) as cluster:
        (folder / "lab/hosts.txt").write_text(cluster.hostfile())
        ttlaunch = CommandLine(cluster, cwd=folder)
        answer = ttlaunch(PREPARE, environment=wheels_for_ranks, timeout_s=_PREPARE_S)
        assert answer.status == 0, answer.stderr
        yield cluster
