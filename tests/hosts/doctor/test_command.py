"""`ttlaunch doctor` where no other machine is needed: this one, and what is wrong with the command line."""

import json

import pytest

from ttlaunch.app.examine import Examination
from ttlaunch.cli.doctor_view import cells, render_lines, render_pairs
from ttlaunch.engines.openmpi import OpenMpiFinder
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.doctor.pairs import Pair

OF_READY = ("ready", "warning")
"""Another test may have left something on this machine, which doctor rightly warns of."""


@pytest.mark.mpi
def test_this_machine_needs_no_ssh(ttlaunch):
    answer = ttlaunch("doctor --format json")

    said = json.loads(answer.stdout)
    assert (0, True) == (answer.status, said["ready"])
    assert ["localhost"] == [host["name"] for host in said["hosts"] if host["state"] in OF_READY]
    assert "all ranks run on one machine" == said["network"]["why"]
    assert [] == said["pairs"]


@pytest.mark.mpi
def test_one_machine_gets_a_line_and_a_verdict(ttlaunch):
    lines = ttlaunch("doctor").stdout.splitlines()

    assert any(lines[0].startswith(f"localhost: {state}; Python 3.") for state in OF_READY)
    assert "local is ready: 1 host, 64 slots" == lines[-1]


def test_files_with_mistakes_are_refused_before_anything_is_asked(ttlaunch, here):
    (here / "hosts.txt").write_text("metal-01 slots=many\n")

    answer = ttlaunch("doctor --hostfile hosts.txt --format concise")

    assert 3 == answer.status
    assert answer.stderr.startswith("hosts.txt:1:")
    assert "" == answer.stdout


def test_an_empty_choice_of_hosts_is_a_mistake(ttlaunch):
    answer = ttlaunch(["doctor", "--hosts", " , "])

    assert 2 == answer.status
    assert "error[P009]: `--hosts  , ` names no host" in answer.stderr


def test_a_line_says_why_a_host_is_missing_and_what_the_others_have(facts):
    shown = Examination(
        ["metal-01", "metal-02"],
        OpenMpiFinder().signature,
        states={"metal-01": "ready", "metal-02": "not ready"},
        facts={"metal-01": facts(1)},
        errors={"metal-02": HostError("metal-02", Trouble.UNREACHABLE, "no answer within 5 s")},
    )

    expected = """\
metal-01: ready; Python 3.11.9, torch 2.6.0, Open MPI 5.0.11, CPU 8 AVX512, devices 1 tt, memory 60/64 GiB, disk 500.0 GiB, clock same
metal-02: not ready: no answer within 5 s
"""
    assert expected.splitlines() == render_lines(shown)
    assert ("metal-02", "not ready") == cells("metal-02", shown)[:2]


def test_measured_pairs_end_with_the_slowest():
    pairs = [Pair("a", "b", 0.001, None, 0.00005, 1.25e9), Pair("b", "a", 0.001, None, 0.00006, 1.25e8)]

    expected = """\
2 of 2 one-way connections between hosts work
from             to                  latency      bandwidth
a                b                     50 us   10.00 Gbit/s
b                a                     60 us    1.00 Gbit/s
slowest: from b to a, 1.00 Gbit/s
"""
    assert expected.splitlines() == render_pairs(pairs)
    assert ["1 of 2 one-way connections between hosts work"] == render_pairs(
        [Pair("a", "b", 0.1), Pair("b", "a", None, "no answer")]
    )
