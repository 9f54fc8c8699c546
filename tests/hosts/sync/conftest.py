"""What tests of the copying share: a project to copy, a host that is this machine, and what arrived there."""

import os

import pytest

from tests.hosts.sync.files import git
from ttlaunch.hosts.sync.release import make_release
from ttlaunch.hosts.sync.results import Synced
from ttlaunch.hosts.sync.send import sync_release
from ttlaunch.hosts.transport.local import LocalTransport


@pytest.fixture
def project(tmp_path):
    """An empty folder, which is no repository."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def repository(project):
    """An empty git repository."""
    git(project, "init", "-q")
    return project


@pytest.fixture
def surroundings(tmp_path):
    """An environment in which nothing is remembered from other tests."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "GIT_CONFIG_GLOBAL": os.devnull}


@pytest.fixture
def release_of(surroundings):
    """`release_of(folder)`: the release of a project that nothing is to be said about."""

    def make(here, **options):
        release, problems = make_release(here, environment=surroundings, **options)
        assert [] == problems
        assert release is not None
        return release

    return make


@pytest.fixture
def problems_of(surroundings):
    """`problems_of(folder)`: severity, code and text of what there is to say about a project."""

    def make(here, **options):
        _, problems = make_release(here, environment=surroundings, **options)
        return [(str(problem.severity), problem.code, problem.message) for problem in problems]

    return make


@pytest.fixture
def copied(release_of):
    """`copied(folder)`: which paths of a project would be copied; folders end in a slash."""

    def look(here, **options):
        entries = release_of(here, **options).manifest.entries
        names = [entry.path.decode("utf-8", "backslashreplace") + "/" * (entry.kind == "d") for entry in entries]
        return [name.removeprefix("project/") for name in names if name.startswith("project/") and name != "project/"]

    return look


class Host:
    """This machine as a host, with a remote folder of the test's own."""

    def __init__(self, folder):
        self.folder = folder

    @property
    def current(self):
        """The project as the host has it."""
        return self.folder / "current/project"

    @property
    def releases(self):
        """Names of the releases, and of anything that was left behind."""
        return sorted(name for name in os.listdir(self.folder / "releases") if not name.endswith(".lock"))

    def ask(self, release, *, bytes_per_s=None, **options):
        """Sync it as over a network of this speed; None if its speed is not known."""
        transport = LocalTransport("localhost")
        transport.bytes_per_s = bytes_per_s
        try:
            outcome = sync_release([transport], release=release, remote_folder=str(self.folder), **options)
            for process in transport._processes:
                process.wait(timeout_s=10)
            return outcome
        finally:
            transport.close()

    def take(self, release, **options):
        """Sync it, and what came of it."""
        answer = self.ask(release, **options).hosts["localhost"]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Synced)
        return answer


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path / "remote")
