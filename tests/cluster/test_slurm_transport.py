"""Steps of a Slurm job keep what every `Transport` promises, show no command to others, and last as long as daemons."""

import os
import re

import pytest

from tests.cluster.keeper import wait_until
from tests.hosts.transport import test_transport as promises
from tests.hosts.transport.conftest import TestHost, descriptors  # noqa: F401 - a fixture
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.slurm import SlurmTransport
from ttlaunch.hosts.transport.transport import run

WANTED = [
    "test_a_command_reads_and_prints",
    "test_a_command_ends_with_its_status",
    "test_standard_error_is_kept_apart",
    "test_a_command_that_does_not_exist_ends_with_127",
    "test_much_data_goes_both_ways_at_the_same_time",
    "test_what_a_command_does_not_read_is_no_error",
    "test_reading_from_a_silent_command_ends_at_the_deadline",
    "test_writing_to_a_command_that_has_ended_says_so",
    "test_a_killed_command_has_nothing_more_to_say",
    "test_killing_wakes_a_thread_that_reads",
    "test_closing_ends_what_runs_and_may_be_repeated",
    "test_nothing_stays_open",
    "test_every_character_of_a_command_arrives",
    "test_a_command_is_for_a_posix_shell_and_starts_at_home",
    "test_a_mistake_in_a_command_line_is_told_by_the_shell",
]
"""The promises that a step could break; the others are those of its srun, a child of this process."""
globals().update({name: getattr(promises, name) for name in WANTED})


@pytest.fixture
def job(slurm4):
    """A job on all hosts."""
    answer = slurm4.run("launcher", ["salloc", "--no-shell", "--nodes=4", "--ntasks-per-node=1"])
    number = re.search(r"job allocation (\d+)", answer.stderr)[1]
    yield number
    slurm4.cancel_all()


@pytest.fixture
def transport(slurm4, job, tmp_path, monkeypatch):
    slurm4.offer_commands(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("socket.getaddrinfo", lambda name, *_: [(0, 0, 0, "", (slurm4.cluster.ip(name), 0))])
    made = SlurmTransport("node1", job)
    made.connect(timeout_s=20)
    yield made
    made.close()


@pytest.fixture
def host(transport):
    return TestHost(transport, shell=True)


shell_host = host


def test_every_byte_passes_both_ways_and_frames_need_no_line_end(transport):
    every = bytes(range(256)) * 40_000
    assert every == run(transport, "cat", stdin=every, timeout_s=60).stdout
    process = transport.start("cat")
    for piece in (b"no line", b"\0", b"\r\xff"):
        process.write(piece, timeout_s=10)
        assert piece == process.read(timeout_s=10)
    process.kill()


def test_the_addresses_are_those_of_the_launching_machine_and_of_the_host(slurm4, transport):
    assert (slurm4.cluster.ip("launcher"), slurm4.cluster.ip("node1")) == transport.addresses


def test_no_command_line_and_no_record_of_slurm_shows_a_command(slurm4, job, transport):
    process = transport.start("cat; : hf_secret_value")
    wait_until(lambda: any(line == "cat" for line in slurm4.cluster.pids("node1").values()), what="cat runs")
    shown = [line for machine in ("launcher", "node1") for line in slurm4.cluster.pids(machine).values()]
    shown.append(slurm4.run("launcher", ["scontrol", "show", "job", job]).stdout)
    shown.append(slurm4.run("launcher", ["scontrol", "show", "step"]).stdout)
    process.kill()
    own = [
        line
        for line in shown
        if "hf_secret_value" in line and "printf %b" not in line and not line.startswith("/bin/sh -c cat")
    ]
    assert [] == own


def test_a_step_lasts_until_the_daemon_of_its_command_has_ended(slurm4, transport):
    def steps():
        return slurm4.run("launcher", ["squeue", "--steps", "--noheader", "--format=%i %j"]).stdout.split()

    process = transport.start("setsid sleep 2 </dev/null >/dev/null 2>&1 & echo started")
    assert b"started\n" == process.read(timeout_s=10)
    assert "ttlaunch" in steps()
    wait_until(lambda: "ttlaunch" not in steps(), what="the step ends after the daemon")
    assert 0 == process.wait(timeout_s=5)


def test_a_step_survives_the_connection_of_its_command(slurm4, transport):
    process = transport.start("sleep 60 & echo $!; cat")
    pid = process.read(timeout_s=10).decode().strip()
    process.kill()
    alive = run(transport, f"kill -0 {pid} && echo alive; kill {pid}", timeout_s=10)
    assert b"alive\n" == alive.stdout


def test_a_host_that_is_no_part_of_the_job_is_named_with_what_srun_says(slurm4, transport, job):
    with pytest.raises(HostError) as caught:
        SlurmTransport("node9", job).connect(timeout_s=10)
    assert (Trouble.STEP, "node9") == (caught.value.trouble, caught.value.host)
    assert "node9" in caught.value.evidence or "node" in caught.value.evidence


def test_a_job_that_was_cancelled_is_named_with_its_end(slurm4, transport, job):
    transport.close()
    slurm4.run("launcher", ["scancel", job])
    wait_until(lambda: not slurm4.queue(), what="the job has ended")
    with pytest.raises(HostError) as caught:
        transport.connect(timeout_s=10)
    assert (Trouble.ENDED, f"Slurm has ended job {job}: CANCELLED") == (caught.value.trouble, caught.value.evidence)


def test_a_host_that_cannot_reach_the_launching_machine_is_named_with_the_ports(slurm4, job, transport):
    transport.close()
    slurm4.cluster.run("launcher", ["iptables", "-w", "-A", "INPUT", "-p", "tcp", "--syn", "-j", "DROP"])
    try:
        with pytest.raises(HostError) as caught:
            transport.connect(timeout_s=5)
    finally:
        slurm4.cluster.run("launcher", ["iptables", "-w", "-F"])
    assert Trouble.STEP is caught.value.trouble
    assert "no step has answered within 5 s" == caught.value.evidence
    assert "SrunPortRange" in caught.value.hints[0]
    assert "munge or slurmd does not answer there: `srun --nodelist=HOST true`" in caught.value.hints[1]
