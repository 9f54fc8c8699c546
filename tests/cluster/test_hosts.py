"""The hosts that other tests rely on are separate machines: they share nothing that real ones would not."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT

pytestmark = pytest.mark.cluster


def ssh(cluster, host, command, *, source="launcher", options=()):
    return cluster.run(source, ["ssh", "-o", "BatchMode=yes", *options, host, command])


def test_the_launcher_reaches_every_host_by_ssh(cluster4):
    for host in cluster4.hosts:
        answer = ssh(cluster4, host, "hostname; pwd; echo $SHELL")
        assert (f"{host}\n/root\n/bin/dash\n", "") == (answer.stdout, answer.stderr)


def test_a_host_reaches_the_next_one_by_ssh(cluster4):
    assert "node2\n" == ssh(cluster4, "node2", "hostname", source="node1").stdout


def test_a_file_of_one_host_is_on_no_other_and_not_on_this_machine(cluster4):
    for folder in ("/root", "/home", "/srv", "/opt", "/var/tmp", "/mnt", "/tmp", "/run", "/dev/shm"):
        path = f"{folder}/only-on-node0"
        assert 0 == cluster4.run("node0", ["sh", "-c", f"echo hello > {path}"]).returncode
        assert "hello\n" == cluster4.path("node0", path).read_text()
        assert "no\n" == cluster4.run("node1", ["sh", "-c", f"test -e {path} || echo no"]).stdout
        assert not Path(path).exists()
        cluster4.path("node0", path).unlink()


def test_a_host_cannot_change_the_programs_of_this_machine(cluster4):
    answer = cluster4.run("node0", ["touch", "/usr/bin/new", "/etc/new", str(ROOT / "new")])
    assert 3 == answer.stderr.count("Read-only file system")


def test_a_host_sees_only_its_own_processes(cluster4):
    lines = "\n".join(cluster4.pids("node0").values())
    seen = cluster4.run("node0", ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).stdout
    assert "sshd" in lines
    assert "sshd" in seen
    assert "pytest" not in lines + seen


def test_a_host_runs_the_code_under_test_where_the_launcher_has_it(cluster4):
    answer = ssh(cluster4, "node3", f"{sys.executable} -c 'import ttlaunch; print(ttlaunch.__file__)'")
    assert f"{ROOT}/ttlaunch/__init__.py\n" == answer.stdout


def test_a_login_finds_no_python_environment_in_its_path(cluster4):
    path = ssh(cluster4, "node0", "echo $PATH").stdout.strip().split(":")
    assert "/usr/bin" in path
    assert str(Path(sys.executable).parent) not in path


def test_without_a_share_the_hosts_have_no_checkout(make_cluster):
    cluster = make_cluster(hosts=1, share=())
    assert "no\n" == cluster.run("node0", ["sh", "-c", f"test -e {ROOT}/pyproject.toml || echo no"]).stdout


def test_no_packet_finds_a_way_out_of_the_cluster(cluster4):
    for machine in ("launcher", "node0"):
        answer = cluster4.run(machine, ["ip", "route", "get", "192.0.2.1"])
        assert "Network is unreachable" in answer.stderr


def test_the_launcher_keeps_its_keys_and_its_own_files_out_of_the_real_home(cluster4):
    home = Path(cluster4.environment("launcher")["HOME"])
    cluster4.run("launcher", ["mkdir", "-p", home / ".ttlaunch/from-a-test"])
    assert not (home / ".ttlaunch/from-a-test").exists()
    known = cluster4.run("launcher", ["cat", home / ".ssh/known_hosts"]).stdout
    assert cluster4.known_hosts == known
    real = home / ".ssh/known_hosts"
    assert not real.exists() or known != real.read_text()


def test_a_program_on_the_launcher_receives_the_signals_that_its_process_gets(cluster4):
    process = cluster4.popen(
        "launcher", ["sh", "-c", "trap 'exit 7' TERM; echo ready; sleep 60 & wait"], stdout=subprocess.PIPE
    )
    assert "ready\n" == process.stdout.readline()
    process.terminate()
    assert 7 == process.wait(10)
    process.stdout.close()


def test_the_command_line_runs_on_the_launcher(cluster4, ttlaunch_on):
    answer = ttlaunch_on(cluster4)("--version")
    assert 0 == answer.status, answer.stderr


def test_a_shared_folder_is_one_folder_on_all_hosts_and_in_the_launchers_home(make_cluster):
    cluster = make_cluster(hosts=2, shared_folder="/root/shared")
    cluster.run("node0", ["sh", "-c", "echo hello > /root/shared/file"])
    assert "hello\n" == cluster.run("node1", ["cat", "/root/shared/file"]).stdout
    if cluster.environment("launcher")["HOME"] == "/root":
        assert "hello\n" == cluster.run("launcher", ["cat", "/root/shared/file"]).stdout
    assert not Path("/root/shared/file").exists()


def test_hosts_have_the_names_interfaces_and_networks_that_a_test_asks_for(make_cluster):
    names = ["metal-01.example", "b"]
    cluster = make_cluster(names=names, interfaces={"b": "enp5s0"}, networks=2)
    assert "metal-01.example slots=2\nb slots=2\n" == cluster.hostfile(slots=2)
    assert "b\n" == ssh(cluster, "10.78.0.11", "hostname").stdout
    interfaces = [sorted(cluster.run(name, ["ls", "/sys/class/net"]).stdout.split()) for name in names]
    assert [["eth0", "eth1", "lo"], ["enp5s0", "eth1", "lo"]] == interfaces


def test_two_clusters_with_the_same_addresses_do_not_meet(cluster4, make_cluster):
    other = make_cluster(hosts=1)
    assert other.ip("node0") == cluster4.ip("node0")
    other.run("node0", ["touch", "/root/mark"])
    assert "mark\n" == ssh(other, "node0", "ls").stdout
    assert "mark" not in ssh(cluster4, "node0", "ls").stdout.split()


def test_an_sshd_on_loopback_takes_a_command(loopback_sshd):
    ended = subprocess.run(
        ["ssh", "-F", loopback_sshd.config_file, "-o", "BatchMode=yes", loopback_sshd.alias, "echo hello"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "hello\n") == (ended.returncode, ended.stdout), ended.stderr
    socket.create_connection((loopback_sshd.address, loopback_sshd.port)).close()
