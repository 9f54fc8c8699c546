"""Gives tests real hosts: one cluster that all share while they do it no harm, and new ones to break."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.command import CommandLine
from tests.cluster.hosts import Cluster
from tests.cluster.needs import what_hosts_lack
from tests.cluster.prepared import prepared_cluster, wheels_for_ranks  # noqa: F401 - fixtures
from tests.cluster.slurm import slurm_cluster, why_no_slurm
from tests.cluster.sshd import LOG

HERE = Path(__file__).parent
_LAST_WORDS = 2000
CLUSTERS = pytest.StashKey[list]()


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
def make_cluster(_hosts_can_start, request):
    """`make_cluster(hosts=2, …)`: a cluster of this test's own; takes the arguments of `Cluster`."""
    with ExitStack() as clusters:
        made = request.node.stash[CLUSTERS] = []

        def make(**options):
            made.append(clusters.enter_context(Cluster(**options)))
            return made[-1]

        yield make


@pytest.fixture(scope="session")
def _slurm_can_start(_hosts_can_start, skip_or_fail):
    if reason := why_no_slurm():
        skip_or_fail(reason)


@pytest.fixture(scope="session")
def _slurm_of_all(_slurm_can_start):
    with slurm_cluster(hosts=4) as slurm:
        yield slurm


@pytest.fixture
def slurm4(_slurm_of_all):
    """Slurm on the hosts node0 to node3, for tests that leave it as it was; a job that one leaves behind is ended."""
    yield _slurm_of_all
    if _slurm_of_all.queue():
        _slurm_of_all.cancel_all()


@pytest.fixture
def make_slurm(_slurm_can_start):
    """`make_slurm(hosts=2, …)`: Slurm on hosts of this test's own, to break; takes the arguments of `Cluster`."""
    with ExitStack() as clusters:
        yield lambda **options: clusters.enter_context(slurm_cluster(**options))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Show what the sshd of each host wrote, where a test with hosts of its own has failed."""
    report = yield
    for cluster in item.stash.get(CLUSTERS, []) if report.failed else ():
        report.sections += [(f"sshd of {host}", _sshd_log(cluster, host)) for host in cluster.hosts]
    return report


def _sshd_log(cluster, host):
    try:
        return cluster.path(host, LOG).read_text(encoding="utf-8")[-_LAST_WORDS:]
    except (OSError, KeyError, ValueError) as error:  # the host has no power, or the test has ended its cluster
        return f"cannot be read: {error}"


@pytest.fixture
def ttlaunch_on(tmp_path):
    """`ttlaunch_on(cluster)("run …")`: the command line, on the launcher, in an empty folder or in `cwd`."""
    return lambda cluster, *, cwd=tmp_path: CommandLine(cluster, cwd=cwd)


def pytest_collection_modifyitems(items):
    """Whatever lies in this folder needs hosts, or a part of what makes them."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("cluster")
