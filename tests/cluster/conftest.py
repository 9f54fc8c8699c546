"""Gives tests real hosts: one cluster that all share while they do it no harm, and new ones to break."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.command import CommandLine
from tests.cluster.hosts import Cluster
from tests.cluster.needs import what_hosts_lack
from tests.cluster.prepared import prepared_cluster, wheels_for_ranks  # noqa: F401 - fixtures

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def _hosts_can_start(skip_or_fail):
    if lack := what_hosts_lack():
        skip_or_fail(lack)


@pytest.fixture(scope="session")
def cluster4(_hosts_can_start):
    """The hosts node0 to node3, for tests that leave them as they were."""
    with Cluster(hosts=4) as cluster:
        yield cluster


@pytest.fixture
def make_cluster(_hosts_can_start):
    """`make_cluster(hosts=2, …)`: a cluster of this test's own; takes the arguments of `Cluster`."""
    with ExitStack() as clusters:
        yield lambda **wishes: clusters.enter_context(Cluster(**wishes))


@pytest.fixture
def ttlaunch_on(tmp_path):
    """`ttlaunch_on(cluster)("run …")`: the command line, on the launcher, in an empty folder or in `cwd`."""
    return lambda cluster, *, cwd=tmp_path: CommandLine(cluster, cwd=cwd)


def pytest_collection_modifyitems(items):
    """Whatever lies in this folder needs hosts, or a part of what makes them."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("cluster")
