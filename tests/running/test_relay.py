"""The relay: mpirun's commands for daemons, made to fit each host; secrets on standard input, never in the command."""

import shlex
import subprocess

import pytest

from ttlaunch.agent import RELAY
from ttlaunch.engines.base import DaemonStart
from ttlaunch.engines.openmpi import OpenMpi, generation_of
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.planning.engine import RanksToStart
from ttlaunch.running.agents.relay import Relay

OPEN_MPI_5 = (
    "PRTE_PREFIX=/opt/here;export PRTE_PREFIX;LD_LIBRARY_PATH=/opt/here/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;"
    '/opt/here/bin/prted --daemonize --prtemca prte_hnp_uri "prterun-vm@0.0;tcp://192.0.2.2:48665:64"'
)
OPEN_MPI_4 = (
    "PATH=/usr/bin:$PATH ; export PATH ; LD_LIBRARY_PATH=/usr/lib:${LD_LIBRARY_PATH:-} ; export LD_LIBRARY_PATH ;"
    '   /usr/bin/orted --daemonize -mca orte_hnp_uri "16.0;tcp://192.0.2.2:56577"'
)
ENGINE = OpenMpi("mpirun", (5, 0, 11), generation_of((5, 0, 11)))
STARTER = ("/srv/env/bin/python", "-S", "/srv/my code/start_daemon.py")
START = DaemonStart("/srv/open mpi", "/srv/env/bin", {"TTLAUNCH_RUN_ID": "r1"}, STARTER, {"A_TOKEN": "it's \n hush"})


@pytest.fixture
def host(tmp_path):
    """A folder that is Open MPI's on the host, with daemons that only say how they were called."""
    for name in ("prted", "orted"):
        program = tmp_path / "mpi/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text('#!/bin/sh\nprintf "%s|" "$TTLAUNCH_RUN_ID" "$A_TOKEN" "$0" "$@"\n')
        program.chmod(0o755)
    return DaemonStart(str(tmp_path / "mpi"), "/srv/env/bin", START.environment, STARTER, START.secrets)


@pytest.fixture
def relay(tmp_path, host):
    made = Relay({"box": LocalTransport("box")}, {"box": host}, engine=ENGINE, scratch=tmp_path, is_lost=lambda _: True)
    yield lambda *words: subprocess.run(
        ["sh", str(tmp_path / "ssh"), *words], capture_output=True, text=True, timeout=20, check=False
    )
    made.close()


def test_the_hosts_own_daemon_gets_mpiruns_arguments():
    command = ENGINE.adapt_daemon(OPEN_MPI_5, START)
    assert "/opt/here" not in command
    assert command.endswith(
        "exec '/srv/open mpi'/bin/prted --daemonize --prtemca prte_hnp_uri \"prterun-vm@0.0;tcp://192.0.2.2:48665:64\""
    )


@pytest.mark.parametrize(
    ("version", "setting"),
    [((5, 0, 11), '--prtemca prte_if_include "10.0.0.0/24"'), ((4, 1, 4), "-mca oob_tcp_if_include 10.0.0.0/24")],
)
def test_a_daemon_that_is_told_its_networks_is_started_by_whoever_keeps_it_there(version, setting):
    engine = OpenMpi("mpirun", version, generation_of(version))
    command = engine.adapt_daemon(f"/opt/here/bin/prted --daemonize {setting}", START)
    starter = "/srv/env/bin/python -S '/srv/my code/start_daemon.py' 10.0.0.0/24"
    assert command.endswith(f"; exec {starter} '/srv/open mpi'/bin/prted --daemonize {setting}")


def test_open_mpi_of_the_system_keeps_its_libraries():
    command = ENGINE.adapt_daemon(OPEN_MPI_4, DaemonStart("/usr", "/usr/bin", {}, STARTER))
    assert "LD_LIBRARY_PATH" not in command
    assert "PREFIX" not in command
    assert command.endswith('exec /usr/bin/orted --daemonize -mca orte_hnp_uri "16.0;tcp://192.0.2.2:56577"')


def test_a_command_without_a_daemon_is_left_alone():
    assert ENGINE.adapt_daemon("echo $SHELL", START) is None


def test_a_secret_is_not_in_the_command():
    assert "hush" not in ENGINE.adapt_daemon(OPEN_MPI_5, START)
    assert "hush" not in repr(START)


@pytest.mark.parametrize("command", [OPEN_MPI_5, OPEN_MPI_4])
def test_a_daemon_gets_run_id_and_secrets_in_its_environment(relay, host, command):
    name = "prted" if "prted" in command else "orted"
    said = relay("box", *shlex.split(command, posix=False))
    assert said.returncode == 0
    assert said.stdout.startswith(f"r1|it's \n hush|{host.prefix}/bin/{name}|--daemonize|")


def test_options_of_ssh_are_understood(relay):
    assert relay("-x", "-l", "ann", "box", "echo", "hello").stdout == "hello\n"
    assert relay("ann@box", "echo", "hello").stdout == "hello\n"


def test_a_host_outside_the_run_is_refused(relay):
    said = relay("elsewhere", "true")
    assert (said.returncode, said.stderr) == (
        255,
        "ttlaunch: mpirun asks for `elsewhere`, which is no host of this run\n",
    )


def test_without_a_launcher_the_reason_is_said(tmp_path):
    said = subprocess.run(
        ["python3", "-I", "-S", RELAY, str(tmp_path / "none"), "box", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 255
    assert said.stderr.startswith("ttlaunch relay: the launcher does not answer: ")


@pytest.mark.parametrize(
    ("version", "variable"), [((5, 0, 11), "PRTE_MCA_plm_ssh_agent"), ((4, 1, 4), "OMPI_MCA_plm_rsh_agent")]
)
def test_each_mpirun_is_told_in_its_own_words(tmp_path, version, variable):
    engine = OpenMpi("mpirun", version, generation_of(version))
    names = engine.command(RanksToStart("python", "shim.py", [], [])).names
    made = Relay({}, {}, engine=engine, scratch=tmp_path, is_lost=lambda _: True)
    assert made.settings(names) == {variable: f"sh {tmp_path}/ssh"}
    made.close()
