"""Doctor on real hosts that are ill: each illness is named, word for word, at its host's line, and nobody else's."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import pytest

from tests.cluster.hosts import PROGRAMS
from ttlaunch import contract

READY, NOT_READY = contract.STATUS_DONE, contract.STATUS_HOST
ENVIRONMENT = Path(sys.executable).parent


@pytest.fixture
def lab(make_cluster, ttlaunch_on, tmp_path):
    """`lab(hosts=2, settings="…", names=[…])`: a cluster described in the folder `lab`, and its command line."""

    def make(*, settings="", listed=None, **options):
        cluster = make_cluster(**{"hosts": 2} | options)
        folder = tmp_path / "lab"
        folder.mkdir()
        (folder / "hosts.txt").write_text("".join(f"{host}\n" for host in listed or cluster.hosts))
        if settings:
            (folder / "cluster.yaml").write_text(settings)
        return cluster, ttlaunch_on(cluster)

    return make


@pytest.fixture
def says():
    """`says(ttlaunch, text)`: doctor writes exactly this to standard error, with names for what is new each time."""

    def compare(ttlaunch, text, *, status=NOT_READY):
        answer = ttlaunch("doctor --on lab")
        shown = re.sub(r"SHA256:[A-Za-z0-9+/]+", "SHA256:…", answer.stderr)
        shown = re.sub(r"(no address for `.*`: ).*", r"\1…", shown)  # the resolver's own words
        shown = re.sub(r"answered within [0-9.]+ s", "answered within … s", shown)
        assert dedent(text).strip("\n") == shown.strip("\n")
        assert status == answer.status, answer.stdout
        return answer

    return compare


@pytest.fixture
def on_terminal():
    """`on_terminal(ttlaunch, line, typed={"what is asked": "answer"})`: the status and all that a terminal received."""

    def run(ttlaunch, line, *, typed=None):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        process = ttlaunch.start(
            line, stdin=theirs, stdout=theirs, stderr=theirs, environment={"TERM": "xterm", "CI": ""}
        )
        os.close(theirs)
        seen, waiting = b"", dict(typed or {})
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                part = os.read(ours, 65536)
            except OSError:  # how Linux says that the last one at the terminal has left
                break
            seen += part
            for question in [question for question in waiting if question.encode() in seen]:
                os.write(ours, waiting.pop(question).encode())
        os.close(ours)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())
        screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", plain)
        return process.wait(timeout=10), "\n".join(line for line in screen.splitlines() if line.strip())

    return run


def pythons_of(cluster, host):
    """Every Python that a script could be run with on a host, by its path there."""
    folders = PROGRAMS.split(":")
    return sorted(f"{folder}/{path.name}" for folder in folders for path in cluster.path(host, folder).glob("python3*"))


def put_program(cluster, host, path, text):
    place = cluster.path(host, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)


def test_a_login_shell_that_runs_nothing_is_named_at_its_host(lab, says):
    cluster, ttlaunch = lab()
    cluster.set_login_shell("node1", "/bin/false")
    says(
        ttlaunch,
        """
        error[H013]: host `node1` did not answer our questions to the end; nothing was started
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ the login shell runs no commands, ends with status 1 and prints nothing
          = note: node0 answered within … s

        hint: `getent passwd USER` on the host names the login shell: /bin/false and nologin run nothing; `usermod --shell /bin/bash USER` sets another

        hint: or look at `ForceCommand` of its sshd
        """,
    )


def test_healthy_hosts_are_ready_and_every_way_between_them_works(lab):
    cluster, ttlaunch = lab(hosts=3)

    answer = ttlaunch("doctor --on lab --format json")

    said = json.loads(answer.stdout)
    assert (READY, "", True, []) == (answer.status, answer.stderr, said["ready"], said["diagnostics"])
    assert cluster.hosts == [host["name"] for host in said["hosts"]]
    assert {"ready"} == {host["state"] for host in said["hosts"]}
    assert {host: cluster.ip(host) for host in cluster.hosts} == said["network"]["addresses"]
    ways = {(a, b) for a in cluster.hosts for b in cluster.hosts if a != b}
    assert ways == {(pair["from"], pair["to"]) for pair in said["pairs"] if pair["problem"] is None}


def test_bandwidth_measures_every_way(lab):
    _, ttlaunch = lab(hosts=2)

    answer = ttlaunch("doctor --on lab --format json --bandwidth")

    for pair in json.loads(answer.stdout)["pairs"]:
        assert 0 < pair["latency_s"] < 0.1
        assert pair["bytes_per_s"] > 1e6


def test_plain_output_has_a_line_for_each_host_and_a_verdict(lab):
    _, ttlaunch = lab(hosts=2)

    lines = ttlaunch("doctor --on lab").stdout.splitlines()

    assert ["node0: ready;", "node1: ready;"] == [" ".join(line.split()[:2]) for line in lines[:2]]
    assert [
        "network: 10.77.0.0/24 is the only network that all 2 hosts share",
        "2 of 2 one-way connections between hosts work",
        "lab is ready: 2 hosts, 2 slots",
    ] == lines[2:]


def test_a_terminal_shows_a_table_that_fills(lab, on_terminal):
    cluster, ttlaunch = lab(hosts=2)
    cluster.stop_sshd("node1")

    status, screen = on_terminal(ttlaunch, "doctor --on lab")

    rows = [line.split() for line in screen.splitlines()]
    assert NOT_READY == status
    assert ["host", "state", "Python", "torch", "Open", "MPI", "CPU", "memory", "disk", "network"] == rows[0]
    assert ["node0", "connecting"] in rows
    assert ["node1", "not", "ready"] in rows
    assert any(row[:2] == ["node0", "ready"] for row in rows)


def test_a_passphrase_is_asked_for_once_and_the_table_goes_on(lab, on_terminal, tmp_path):
    cluster, ttlaunch = lab(hosts=2, settings=f"identity_file: {tmp_path}/locked\n")
    key = cluster.path("launcher", "/root/.ssh/id_ed25519")
    (tmp_path / "locked").write_bytes(key.read_bytes())
    (tmp_path / "locked").chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", tmp_path / "locked"], check=True)
    key.unlink()

    status, screen = on_terminal(ttlaunch, "doctor --on lab", typed={"passphrase of": "open sesame\n"})

    assert READY == status, screen
    assert 1 == screen.count("passphrase of")
    assert "open sesame" not in screen
    assert "lab is ready: 2 hosts, 2 slots" in screen


def test_some_hosts_can_be_asked_alone(lab):
    cluster, ttlaunch = lab(hosts=2)
    cluster.stop_sshd("node1")

    assert READY == ttlaunch("doctor --on lab --hosts node0").status
    wrong = ttlaunch("doctor --on lab --hosts nod0")
    assert contract.STATUS_USAGE == wrong.status
    assert "there is no host `nod0` in lab hint: did you mean `node0`?" in " ".join(wrong.stderr.split())


def test_a_refused_connection_is_told_beside_the_host_that_answered(lab, says):
    cluster, ttlaunch = lab()
    cluster.stop_sshd("node1")

    answer = says(
        ttlaunch,
        """
        error[H002]: host `node1` is not ready; nothing was started
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ connection refused on port 22
          = note: node0 answered within … s

        hint: try it by hand: `ssh -o BatchMode=yes root@node1 true`
        """,
    )

    assert "node1: not ready: connection refused on port 22\n" in answer.stdout
    assert "lab is not ready: 1 of 2 hosts not ready\n" in answer.stdout


def test_a_name_without_an_address_is_told(lab, says):
    _, ttlaunch = lab(hosts=1, listed=["node0", "node-nowhere"])

    says(
        ttlaunch,
        """
        error[H002]: host `node-nowhere` is not ready; nothing was started
         --> lab/hosts.txt:2:1
          |
        2 | node-nowhere
          | ^^^^^^^^^^^^ no address for `node-nowhere`: …
          = note: node0 answered within … s

        hint: `getent hosts node-nowhere` must print an address
        """,
    )


def test_a_host_that_accepts_and_never_speaks_costs_its_deadline_and_no_more(lab, says):
    cluster, ttlaunch = lab()
    cluster.silent_port("node1")
    began = time.monotonic()

    says(
        ttlaunch,
        """
        error[H002]: host `node1` is not ready; nothing was started
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ accepts connections on port 22 and sends nothing within 5 s
          = note: node0 answered within … s

        hint: try it by hand: `ssh -o BatchMode=yes root@node1 true`
        """,
    )

    assert time.monotonic() - began < 15


def test_a_key_that_is_not_accepted_is_told_with_its_fingerprint(lab, says):
    cluster, ttlaunch = lab()
    cluster.path("node1", "/root/.ssh/authorized_keys").write_text("")

    says(
        ttlaunch,
        """
        error[H011]: host `node1` refuses the login; nothing was started
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ login as root refused: the key was not accepted
          = note: offered /root/.ssh/id_ed25519 (SHA256:…)
          = note: node0 answered within … s

        hint: let it accept a key of yours: `ssh-copy-id root@node1`

        hint: try it by hand: `ssh -o BatchMode=yes root@node1 true`
        """,
    )


def test_an_unknown_host_key_is_refused_with_the_command_that_accepts_it(lab, says):
    cluster, ttlaunch = lab()
    known = cluster.path("launcher", "/root/.ssh/known_hosts")
    known.write_text("".join(line for line in known.read_text().splitlines(keepends=True) if "node1" not in line))

    says(
        ttlaunch,
        """
        error[H009]: host `node1` has a host key that is not known here; nothing was started
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ its host key is not known: ED25519 SHA256:…
          = note: looked for `node1` in /root/.ssh/known_hosts
          = note: node0 answered within … s

        hint: compare the fingerprint, then trust the key: `ssh root@node1 true`
        """,
    )


def test_a_changed_host_key_is_refused_with_both_fingerprints(lab, says):
    cluster, ttlaunch = lab()
    cluster.new_host_key("node1")

    says(
        ttlaunch,
        """
        error[H010]: host `node1` has another host key than the known one; nothing was started
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ its host key has changed to ED25519 SHA256:…
          = note: /root/.ssh/known_hosts:2 has ED25519 SHA256:…
          = note: the host was installed anew, or another machine answers in its place
          = note: node0 answered within … s

        hint: if the new fingerprint is the host's own: `ssh-keygen -f /root/.ssh/known_hosts -R node1`, then `ssh root@node1 true`
        """,
    )


def test_a_host_that_takes_only_passwords_is_told(lab, says):
    cluster, ttlaunch = lab()
    cluster.password_only("node1")

    says(
        ttlaunch,
        """
        error[H011]: host `node1` refuses the login; nothing was started
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ takes only passwords
          = note: ttlaunch logs in with keys and never asks for a password
          = note: node0 answered within … s

        hint: let its sshd accept keys (`PubkeyAuthentication yes`), then `ssh-copy-id root@node1`
        """,
    )


def test_a_host_without_python_is_told_where_it_was_looked_for(lab, says):
    cluster, ttlaunch = lab(share=())
    for path in pythons_of(cluster, "node1"):
        cluster.hide("node1", path)

    answer = ttlaunch("doctor --on lab --format json")

    said = [one for one in json.loads(answer.stdout)["diagnostics"] if one["code"] == "H014"]
    assert NOT_READY == answer.status
    assert ["host `node1` has no Python that can be used; nothing was started"] == [one["message"] for one in said]
    looked = "no Python 3.9 or newer: looked for python3, /usr/bin/python3, /usr/local/bin/python3 and others"
    assert looked == said[0]["primary"]["label"]


def test_a_python_that_is_too_old_says_its_version(lab):
    cluster, ttlaunch = lab(share=())
    old = '#!/bin/sh\necho "python $0 is 3.6" >&2\nexit 79\n'
    for path in pythons_of(cluster, "node1"):
        cluster.replace("node1", path, old)

    answer = ttlaunch("doctor --on lab --format json")

    said = [one for one in json.loads(answer.stdout)["diagnostics"] if one["code"] == "H014"]
    assert ["host `node1` has no Python that can be used; nothing was started"] == [one["message"] for one in said]
    assert "its Python is too old: /usr/bin/python3 is 3.6" in said[0]["primary"]["label"]


def test_a_python_without_the_packages_of_ranks_is_told(lab, says):
    cluster, ttlaunch = lab(settings="python: /opt/env/bin/python\nmpi_prefix: /opt/env\n")
    for host in cluster.hosts:
        put_program(cluster, host, "/opt/env/bin/mpirun", f'exec {ENVIRONMENT}/mpirun "$@"')
    put_program(cluster, "node0", "/opt/env/bin/python", f'exec {sys.executable} "$@"')
    put_program(cluster, "node1", "/opt/env/bin/python", f'exec {sys.executable} -I -S "$@"')

    says(
        ttlaunch,
        f"""
        error[H005]: host `node1` has no torch, mpi4py, numpy or pydantic
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ no torch, mpi4py, numpy or pydantic for {sys.executable}
          = note: looked up by metadata; ranks import all of torch, mpi4py, numpy and pydantic

        hint: `python:` in cluster.yaml names /opt/env/bin/python; without it `ttlaunch prepare --on lab` makes the environment that ranks need
        """,
    )


def test_another_mpi_is_told_by_what_its_mpirun_says(lab, says):
    cluster, ttlaunch = lab(settings="mpi_prefix: /opt/mpi\n")
    put_program(cluster, "node0", "/opt/mpi/bin/mpirun", f'exec {ENVIRONMENT}/mpirun "$@"')
    put_program(cluster, "node1", "/opt/mpi/bin/mpirun", "echo HYDRA build details:")

    says(
        ttlaunch,
        """
        error[H003]: host `node1` has an mpirun that cannot be used
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ /opt/mpi/bin/mpirun says: HYDRA build details:

        hint: `mpi_prefix:` in cluster.yaml names /opt/mpi; it is to be a folder with bin/mpirun of Open MPI, and without it that of the interpreter's environment is taken
        """,
    )


def test_another_torch_on_one_host_is_told_from_its_metadata(lab):
    cluster, ttlaunch = lab(settings="python: /opt/env/bin/python\n")
    put_program(cluster, "node0", "/opt/env/bin/python", f'exec {sys.executable} "$@"')
    put_program(cluster, "node1", "/opt/env/bin/python", f'PYTHONPATH=/opt/other exec {sys.executable} "$@"')
    cluster.path("node1", "/opt/other/torch-1.0.0.dist-info").mkdir(parents=True)

    answer = ttlaunch("doctor --on lab --format concise")

    expected = f"lab/hosts.txt:2:1: error[H015]: host `node1` differs from the others: torch 1.0.0 ({version('torch')} elsewhere)\n"
    assert (NOT_READY, expected) == (answer.status, answer.stderr)


def test_a_clock_that_is_an_hour_ahead_is_told(lab, says):
    cluster, ttlaunch = lab()
    cluster.replace("node1", "/usr/bin/date", "#!/bin/sh\nexec python3 -c 'import time; print(time.time() + 3600)'\n")

    says(
        ttlaunch,
        """
        error[H019]: host `node1` has a clock that is 60 minutes ahead
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ 60 minutes ahead
          = note: time stamps from all hosts decide who failed first

        hint: `ssh node1 sudo timedatectl set-ntp true`, or `sudo chronyc makestep` there
        """,
    )


def test_a_full_disk_is_told(lab, says):
    cluster, ttlaunch = lab(settings="remote_folder: /srv/ttlaunch\n")
    cluster.small_disk("node1", "/srv")
    cluster.run("node1", ["sh", "-c", "cat /dev/zero > /srv/full"])

    says(
        ttlaunch,
        """
        error[H016]: host `node1` does not allow writing in /srv/ttlaunch (below /srv): no space left on device
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ /srv/ttlaunch (below /srv): no space left on device

        hint: `ssh node1 df -h '/srv/ttlaunch'`

        hint: `remote_folder:` in cluster.yaml chooses another place
        """,
    )


def test_a_read_only_home_is_told(lab, says):
    cluster, ttlaunch = lab()
    cluster.make_read_only("node1", "/root")

    says(
        ttlaunch,
        """
        error[H016]: host `node1` does not allow writing in /root/.ttlaunch (below /root): read-only file system
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ /root/.ttlaunch (below /root): read-only file system

        hint: `ssh node1 df -h '~/.ttlaunch'`

        hint: `remote_folder:` in cluster.yaml chooses another place
        """,
    )


def test_two_names_of_one_machine_are_told(lab, says):
    _, ttlaunch = lab(hosts=1, listed=["node0", "10.77.0.10"])

    says(
        ttlaunch,
        """
        error[H017]: `node0` and `10.77.0.10` are the same machine, `node0`
         --> lab/hosts.txt:2:1
          |
        2 | 10.77.0.10
          | ^^^^^^^^^^ the same machine as node0
         --> lab/hosts.txt:1:1
          |
        1 | node0
          | ----- its other name
          = note: both names show the same boot of the same kernel, in the same namespaces

        hint: keep one line, with the slots of both
        """,
    )


def test_a_name_that_means_another_machine_on_another_host_is_told(lab, says):
    cluster, ttlaunch = lab()
    cluster.set_hosts_file("node1", f"127.0.0.1 localhost\n{cluster.ip('node1')} node0 node1\n")

    says(
        ttlaunch,
        """
        warning[H018]: host `node1` takes another machine for `node0`
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ here node0 means 10.77.0.11, which is node1; node0 has 10.77.0.10
          = note: MPI connects by address; programs that meet by name, as gloo and NCCL do, would meet the wrong one

        hint: `ssh node1 getent hosts node0`, then correct its /etc/hosts or its DNS
        """,
        status=READY,
    )


def test_docker_and_other_names_of_interfaces_do_not_lead_the_choice_astray(lab):
    cluster, ttlaunch = lab(interfaces={"node1": "enp3s0"})
    for host in cluster.hosts:
        cluster.add_interface(host, "docker0", "172.17.0.1/16")
        cluster.add_interface(host, "lab0", "192.168.100.1/24")

    answer = ttlaunch("doctor --on lab --format json")

    network = json.loads(answer.stdout)["network"]
    assert (READY, ["10.77.0.0/24"], ["10.77.0.0/24"]) == (answer.status, network["ranks"], network["control"])


def test_a_pair_that_cannot_talk_is_named_by_both_ends(lab, says):
    cluster, ttlaunch = lab(hosts=3)
    cluster.partition("node0", "node2")

    says(
        ttlaunch,
        """
        error[H028]: `node0` and `node2` cannot talk to each other on 10.77.0.0/24; nothing was started
         --> lab/hosts.txt:1:1
          |
        1 | node0
          | ^^^^^ 10.77.0.10
         --> lab/hosts.txt:3:1
          |
        3 | node2
          | ----- 10.77.0.12
          = note: from node0 to node2: no answer
          = note: from node2 to node0: no answer

        hint: open ports 1024 to 65535 between these hosts in their firewalls, or choose another network: `network: 10.0.0.0/24` in cluster.yaml
        """,
    )


def test_a_firewall_that_refuses_one_way_is_told_for_that_way(lab):
    cluster, ttlaunch = lab()
    refuse = f"iptables -A INPUT -p tcp --syn -s {cluster.ip('node0')} -j REJECT --reject-with tcp-reset"
    cluster.run("node1", refuse.split(), check=True)

    answer = ttlaunch("doctor --on lab --format json")

    said = json.loads(answer.stdout)["diagnostics"]
    assert [("H028", ["from node0 to node1: connection refused"])] == [(one["code"], one["notes"]) for one in said]


def test_another_mtu_is_a_warning(lab, says):
    cluster, ttlaunch = lab(hosts=3)
    cluster.set_mtu("node1", 1400)

    says(
        ttlaunch,
        """
        warning[H029]: host `node1` has MTU 1400 on the chosen network, the others have 1500
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ^^^^^ eth0 has MTU 1400
          = note: messages between ranks pass, but may be slow; a switch that cannot fragment packets drops those that are too large

        hint: `ssh node1 sudo ip link set eth0 mtu 1500`
        """,
        status=READY,
    )


def test_a_way_on_which_large_packets_vanish_is_told(lab, says):
    cluster, ttlaunch = lab()
    drop = f"iptables -A INPUT -s {cluster.ip('node0')} -m length --length 1000:65535 -j DROP"
    cluster.run("node1", drop.split(), check=True)

    says(
        ttlaunch,
        """
        error[H029]: between `node0` and `node1` large packets are lost on 10.77.0.0/24; nothing was started
         --> lab/hosts.txt:1:1
          |
        1 | node0
          | ^^^^^ 10.77.0.10
         --> lab/hosts.txt:2:1
          |
        2 | node1
          | ----- 10.77.0.11
          = note: from node0 to node1: large packets are lost

        hint: `ip link show` on both hosts and the switch between them: all need one MTU
        """,
    )


def test_a_process_of_an_earlier_run_is_told_by_its_number_on_that_host(lab):
    cluster, ttlaunch = lab()
    environment = {**cluster.environment("node1"), contract.ENV_RUN_ID: "2026-08-01T10-00-00"}
    started = cluster.run("node1", ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"], env=environment, check=True)

    answer = ttlaunch("doctor --on lab --format json")

    said = json.loads(answer.stdout)["diagnostics"]
    assert ["host `node1` has leftovers: 1 process of run 2026-08-01T10-00-00"] == [one["message"] for one in said]
    assert [f"`ssh node1 kill {int(started.stdout)}`"] == said[0]["hints"]
    assert READY == answer.status


def test_the_launching_machine_may_be_one_of_the_hosts(lab):
    cluster, ttlaunch = lab(listed=["localhost", "node0", "node1"])

    answer = ttlaunch("doctor --on lab --format json")

    said = json.loads(answer.stdout)
    ready = {"localhost": cluster.ip("launcher"), "node0": cluster.ip("node0"), "node1": cluster.ip("node1")}
    assert (READY, ready) == (answer.status, said["network"]["addresses"])
    assert 6 == sum(pair["problem"] is None for pair in said["pairs"])


@pytest.mark.parametrize("wanted", ["10.78.0.0/24", "eth1"])
def test_ranks_and_daemons_may_use_different_networks(lab, wanted):
    cluster, ttlaunch = lab(networks=2, settings=f"network: {wanted}\n")

    answer = ttlaunch("doctor --on lab --format json")

    network = json.loads(answer.stdout)["network"]
    assert (READY, ["10.78.0.0/24"], ["10.77.0.0/24"]) == (answer.status, network["ranks"], network["control"])
    assert {host: cluster.ip(host, network=1) for host in cluster.hosts} == network["addresses"]
