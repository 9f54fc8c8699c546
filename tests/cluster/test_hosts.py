"""The hosts that other tests rely on: separate, reachable, breakable in the ways they promise, and gone afterwards."""

import subprocess

import pytest

pytestmark = pytest.mark.cluster


def test_the_launcher_reaches_every_host_by_ssh(cluster4):
    for host in cluster4.hosts:
        answer = cluster4.run("launcher", ["ssh", "-o", "BatchMode=yes", host, "hostname; pwd; echo $SHELL"])
        assert f"{host}\n/root\n/bin/dash\n" == answer.stdout
        assert "" == answer.stderr


def test_the_command_line_runs_on_the_launcher(cluster4, ttlaunch_on):
    answer = ttlaunch_on(cluster4)("--version")
    assert 0 == answer.status, answer.stderr


def test_an_sshd_on_loopback_takes_a_command(loopback_sshd, tmp_path):

    ended = subprocess.run(
        ["ssh", "-F", loopback_sshd.config_file, "-o", "BatchMode=yes", "box", "echo hello"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "hello\n") == (ended.returncode, ended.stdout), ended.stderr
