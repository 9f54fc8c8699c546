"""The ways in which test hosts break are those that the tests of the launcher rely on, and each can be undone."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.keeper import wait_until

pytestmark = pytest.mark.cluster

CONNECT = """
import socket, sys, time
started = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], 22), timeout=float(sys.argv[2])) as connection:
        took = time.monotonic() - started
        print("greeted" if connection.recv(4) == b"SSH-" else "closed", took)
except TimeoutError:
    print("silent", 0)
except ConnectionRefusedError:
    print("refused", 0)
except OSError as error:
    print(type(error).__name__, 0)
"""


def knock(cluster, host, *, source="launcher", timeout_s=10):
    """What port 22 says, such as greeted, refused or silent; and how many seconds the connection took."""
    python = sys.executable if source == "launcher" else "/usr/bin/python3"
    said, took = cluster.run(source, [python, "-S", "-c", CONNECT, host, timeout_s]).stdout.split()
    return said, float(took)


def silent(cluster, host, *, source="launcher"):
    return knock(cluster, host, source=source, timeout_s=0.5)[0] == "silent"


def ssh(cluster, host, command, *, user="root", timeout_s=20):
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout_s}"]
    return cluster.run("launcher", ["ssh", *options, f"{user}@{host}", command])


@pytest.fixture
def cluster(make_cluster):
    return make_cluster(hosts=2, share=())


def test_after_a_power_cut_a_host_is_silent_and_has_kept_its_disk_but_not_its_memory(cluster):
    cluster.run("node0", ["touch", "/root/kept", "/srv/kept", "/tmp/lost", "/dev/shm/lost"])
    session = cluster.popen("launcher", ["ssh", "node0", "echo ready; sleep 60"], stdout=subprocess.PIPE)
    assert "ready\n" == session.stdout.readline()
    processes = cluster.pids("node0")
    cluster.kill("node0")
    assert processes
    assert [] == [pid for pid, words in processes.items() if _runs(pid, words)]
    assert session.poll() is None, "the host said goodbye"
    assert silent(cluster, "10.77.0.10")
    assert cluster.path("node0", "/root/kept").exists()
    assert {} == cluster.pids("node0")
    with pytest.raises(RuntimeError, match="node0 has no power"):
        cluster.run("node0", ["true"])

    cluster.revive("node0")
    listing = ssh(cluster, "node0", "ls /root /srv /tmp /dev/shm").stdout
    assert (2, 0) == (listing.count("kept"), listing.count("lost"))
    session.kill()
    session.communicate()


def _runs(pid, words):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ").strip() == words
    except OSError:
        return False


def test_a_pulled_cable_silences_a_host_until_it_is_put_back(cluster):
    cluster.link("node0", up=False)
    assert silent(cluster, "10.77.0.10")
    cluster.link("node0", up=True)
    wait_until(lambda: knock(cluster, "10.77.0.10")[0] == "greeted", what="node0 answers")


def test_a_partition_cuts_two_hosts_apart_and_leaves_both_to_the_launcher(cluster):
    cluster.partition("node0", "node1")
    assert silent(cluster, "10.77.0.11", source="node0")
    assert silent(cluster, "10.77.0.10", source="node1")
    assert ["greeted"] * 2 == [knock(cluster, cluster.ip(host))[0] for host in cluster.hosts]
    cluster.heal()
    assert "greeted" == knock(cluster, "10.77.0.11", source="node0")[0]


def test_a_partition_lasts_over_a_power_cut(cluster):
    cluster.partition("node0", "node1")
    cluster.kill("node0")
    cluster.revive("node0")
    assert silent(cluster, "10.77.0.10", source="node1")


def test_the_processes_of_a_paused_host_wait_until_it_goes_on(cluster):
    cluster.pause("node1")
    assert silent(cluster, "node1")
    cluster.resume("node1")
    assert "greeted" == knock(cluster, "node1")[0]


def test_a_slow_cable_holds_frames_back_each_way_and_loses_none(cluster):
    cluster.delay("node0", 40)
    said, took = knock(cluster, "node0")
    assert "greeted" == said
    assert 0.08 <= took < 1
    sent = ssh(cluster, "node0", "head -c 8000000 /dev/zero").stdout
    assert 8_000_000 == len(sent)
    cluster.kill("node0")
    cluster.revive("node0")
    assert knock(cluster, "node0")[1] >= 0.08
    cluster.delay("node0", 0)
    assert knock(cluster, "node0")[1] < 0.08


def test_ssh_refuses_a_host_with_another_key(cluster):
    cluster.new_host_key("node0")
    answer = ssh(cluster, "node0", "hostname")
    assert 255 == answer.returncode
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in answer.stderr


def test_port_22_may_be_closed_or_silent_also_after_a_power_cut(cluster):
    cluster.stop_sshd("node0")
    assert ("refused", 0) == knock(cluster, "node0")
    cluster.silent_port("node0")
    assert silent(cluster, "node0")
    cluster.kill("node0")
    cluster.revive("node0")
    assert "Connection timed out during banner exchange" in ssh(cluster, "node0", "hostname", timeout_s=1).stderr
    cluster.start_sshd("node0")
    assert "node0\n" == ssh(cluster, "node0", "hostname").stdout


def test_a_host_that_takes_only_passwords_offers_nothing_else(cluster):
    cluster.password_only("node0")
    assert "Permission denied (password)." in ssh(cluster, "node0", "hostname").stderr
    cluster.configure_sshd("node0")
    assert 0 == ssh(cluster, "node0", "hostname").returncode


def test_a_user_of_one_host_logs_in_there_and_nowhere_else(cluster):
    cluster.add_user("node0", "alice")
    assert "alice /home/alice\n" == ssh(cluster, "node0", "echo $(id -un) $(pwd); touch mine", user="alice").stdout
    assert "Permission denied" in ssh(cluster, "node1", "true", user="alice").stderr


def test_a_host_may_have_no_python_or_another_also_after_a_power_cut(cluster):
    cluster.hide("node0", "/usr/bin/python3")
    assert 126 == ssh(cluster, "node0", "/usr/bin/python3 -V").returncode
    cluster.replace("node0", "/usr/bin/python3", "#!/bin/sh\necho Python 3.6.8\n")
    cluster.kill("node0")
    cluster.revive("node0")
    assert "Python 3.6.8\n" == ssh(cluster, "node0", "/usr/bin/python3 -V").stdout
    assert "Python 3.6.8\n" != ssh(cluster, "node1", "/usr/bin/python3 -V").stdout
    cluster.restore("node0", "/usr/bin/python3")
    assert "Python 3.6.8\n" != ssh(cluster, "node0", "/usr/bin/python3 -V").stdout


def test_a_home_may_be_read_only_or_full(cluster):
    cluster.make_read_only("node0", "/root")
    assert "Read-only file system" in ssh(cluster, "node0", "touch file").stderr
    cluster.make_writable("node0", "/root")
    assert 0 == ssh(cluster, "node0", "touch file").returncode
    cluster.small_disk("node0", "/root", size_mb=1)
    assert "No space left on device" in ssh(cluster, "node0", "head -c 2000000 /dev/zero > file").stderr
    cluster.small_disk("node1", "/srv/data/deep", size_mb=1)
    assert "No space left on device" in ssh(cluster, "node1", "head -c 2000000 /dev/zero > /srv/data/deep/file").stderr


def test_disks_in_memory_have_the_size_that_a_test_asks_for(make_cluster):
    cluster = make_cluster(hosts=1, share=(), size_mb=2)
    assert "No space left on device" in ssh(cluster, "node0", "head -c 4000000 /dev/zero > file").stderr
    ssh(cluster, "node0", "rm file; touch kept")
    cluster.kill("node0")
    cluster.revive("node0")
    assert "kept\n" == ssh(cluster, "node0", "ls").stdout


def test_a_host_may_have_docker0_another_mtu_and_other_ideas_about_names(cluster):
    for host in cluster.hosts:
        cluster.add_interface(host, "docker0", "172.17.0.1/16")
    cluster.set_mtu("node0", 9000)
    cluster.set_hosts_file("node0", "127.0.0.1 localhost\n10.77.0.10 other\n")
    cluster.kill("node0")
    cluster.revive("node0")
    addresses = [cluster.run(host, ["ip", "-br", "-4", "addr"]).stdout for host in cluster.hosts]
    assert all("172.17.0.1/16" in text for text in addresses)
    assert "9000\n" == cluster.run("node0", ["cat", "/sys/class/net/eth0/mtu"]).stdout
    assert "10.77.0.10      other\n" == cluster.run("node0", ["getent", "hosts", "other"]).stdout
    assert 2 == cluster.run("node0", ["getent", "hosts", "node1"]).returncode


def test_a_command_line_that_never_ends_is_killed_with_all_it_started(cluster, ttlaunch_on, tmp_path):
    stuck = tmp_path / "ttlaunch.py"
    stuck.write_text("import subprocess\nsubprocess.run(['sleep', '61'])\n")
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="did not end within 1 s"):
        ttlaunch_on(cluster)("run", timeout_s=1)
    assert time.monotonic() - started < 20
    wait_until(lambda: "sleep 61" not in cluster.pids("launcher").values(), what="nothing is left")
