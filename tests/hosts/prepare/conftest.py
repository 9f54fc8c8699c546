"""This machine as the only host, with a remote folder of its own and small wheels instead of torch."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.prepare.wheels import PINS, WheelFolder


@dataclass
class Bench:
    """One host that is this machine.

    Attributes:
        run: `run("--check")` is `ttlaunch prepare --on bench --check`.
    """

    folder: Path
    remote: Path
    wheels: WheelFolder
    run: object

    def json(self, line=""):
        return json.loads(self.run(f"{line} --format json").stdout)

    @property
    def environment(self):
        """The name of the environment that runs would use."""
        return Path(os.readlink(self.remote / "env")).name  # noqa: PTH115 - the link itself


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """Wheels that all tests share, and ttlaunch's cache of them, so that pip settles the usual versions once."""
    folder = tmp_path_factory.mktemp("stock")
    return WheelFolder(folder / "wheels").add_everything(), folder / "cache"


@pytest.fixture
def bench(here, monkeypatch, ttlaunch, stock):
    shared, cache = stock
    wheels = WheelFolder(here / "wheels")
    links = f"{shared.folder.as_uri()} wheels"  # the test's own are named as seen from its folder, equal for all tests
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in (wheels.environment | {"XDG_CACHE_HOME": str(cache), "PIP_FIND_LINKS": links}).items():
        monkeypatch.setenv(name, value)
    (here / "constraints.txt").write_text(PINS)
    (here / "bench").mkdir()
    (here / "bench/hosts.txt").write_text("localhost slots=2\n")
    (here / "bench/cluster.yaml").write_text(f"remote_folder: '{here}/remote'\n")
    return Bench(here, here / "remote", wheels, lambda line="": ttlaunch(f"prepare --on bench {line}"))
