"""What a terminal says while a host has not answered, or has not started its ranks."""

import sys

import pytest

from tests.cli.screen import Terminal


@pytest.fixture
def half_silent(make_cluster, tmp_path):
    """Two hosts, described in `lab`; the second accepts connections and never says a word."""
    cluster = make_cluster(hosts=2)
    cluster.silent_port("node1")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/hosts.txt").write_text(cluster.hostfile())
    return cluster


def test_a_terminal_names_the_host_that_has_not_answered(half_silent, tmp_path):
    command = half_silent.argv("launcher", sys.executable, "-m", "ttlaunch", cwd=tmp_path)
    home = half_silent.environment("launcher")["HOME"]
    shown = Terminal(tmp_path, "run", "fabric_minimal", "--on", "lab", command=command, HOME=home)
    assert 4 == shown.ends(within_s=60)
    assert "waiting for host node1" in shown.text
    shown.close()


def test_where_nothing_is_redrawn_a_line_names_it(half_silent, ttlaunch_on):
    answer = ttlaunch_on(half_silent)("run fabric_minimal --on lab")
    assert (4, "waiting for host node1") == (answer.status, answer.stderr.splitlines()[0])
