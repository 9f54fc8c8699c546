"""What the agent of a hostile host sends: nothing is written for ranks of others, and the host is lost under its own name."""

import resource

import pytest

from tests.running.conftest import wait_until
from tests.security.hostile import HostileHost, greeting, piece, raw_frame
from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.doctor.pairs import measure_pairs
from ttlaunch.profiling import profile_file
from ttlaunch.records.agents import FilePiece, parse_agent_frame
from ttlaunch.records.parser import LONGEST_RECORD
from ttlaunch.records.ranks import StepDone, moved_back
from ttlaunch.running import lost_hosts
from ttlaunch.running.agents.agent_starter import AgentStarter
from ttlaunch.running.agents.host_link import HostLink
from ttlaunch.running.runs.run_folder import RunFolder

OWN, FOREIGN = 1, 0
SHARD = f"checkpoints/step-10.tmp/rank-{OWN}.json"
REFUSED = {
    "a file of a rank of another host": piece(contract.stdout_file(FOREIGN)),
    "the end of a rank of another host": piece(contract.exit_file(FOREIGN), b'{"status": 0, "time": 1.0}'),
    "a rank that there is not": piece("logs/rank-999999999.stdout"),
    "a file of no known kind": piece(f"logs/rank-{OWN}.sh"),
    "a record that nobody reads": piece(f"records/rank-{OWN}.plan.json"),
    "another spelling of a rank": piece(f"logs/rank-0{OWN}.stdout"),
    "the plan": piece("plan.json"),
    "a place outside": piece(f"logs/../../rank-{OWN}.stdout"),
    "a shard of a step that cannot be": piece("checkpoints/step-101.tmp/rank-1.json", b"{}"),
    "a shard of no step": piece("checkpoints/step-0.tmp/rank-1.json", b"{}"),
    "a shard of another host": piece(f"checkpoints/step-10.tmp/rank-{FOREIGN}.json", b"{}"),
    "a whole checkpoint": piece("checkpoints/step-10/manifest.json", b"{}"),
    "a record in pieces": piece(contract.exit_file(OWN), whole=False),
    "a log that appears whole": piece(contract.stdout_file(OWN), whole=True),
    "a NUL in a name": piece(f"logs/rank-{OWN}.stdout\0"),
    "a lost shim of another host": contract.pack_frame({"kind": "lost_shim", "rank": FOREIGN, "time": 1.0}),
    "stopped ranks of another host": contract.pack_frame(
        {"kind": "looked", "question": 1, "stopped": [FOREIGN], "faults": []}
    ),
    "a time of four thousand digits": raw_frame(b'{"kind": "lost_shim", "rank": 1, "time": ' + b"9" * 4000 + b"}"),
    "a time that is none": contract.pack_frame({"kind": "lost_shim", "rank": OWN, "time": "y"}),
    "a clock without end": raw_frame(b'{"kind": "alive", "clock": 1e400, "done": 0}'),
    "a header nested without end": raw_frame(b"[" * 200_000),
    "a header of millions of values": raw_frame(b'{"kind": [' + b"[]," * 1_000_000 + b"0]}"),
    "a header of gigabytes": (2**31).to_bytes(4, "big") + bytes(4),
    "a body longer than any record": piece(contract.stdout_file(OWN), bytes(LONGEST_RECORD + 1)),
}
LEASE = {"lease_s": 0.2, "socket": "", "folder": ""}


@pytest.fixture
def linked(monkeypatch):
    """`linked(says)`: the link to a host that says this after its greeting, and what was kept; ended with the test."""
    monkeypatch.setattr(lost_hosts, "FENCE_S", 0.2)  # there are no ranks to end
    links = []

    def make(says):
        kept = []
        host = HostileHost("evil", lambda: greeting() + says)
        ignore = {"keep": lambda *piece: kept.append(piece), "note": lambda *_, **__: None}
        link = HostLink(host.transport, LEASE, ranks=[OWN], last_step=100, python="/evil/python", **ignore)
        link.start()
        link.follow()
        links.append(link)
        return link, kept

    yield make
    for link in links:
        link.end()
        assert link.over.wait(30.0)


@pytest.mark.parametrize("says", REFUSED.values(), ids=REFUSED)
def test_a_host_that_speaks_of_what_it_does_not_have_is_lost_and_named_and_nothing_is_kept(linked, says):
    link, kept = linked(says)
    lost = wait_until(lambda: link.lost, within_s=30.0, what="the host is lost")
    assert ("evil", Trouble.SCRIPT) == (lost.error.host, lost.error.trouble)
    assert lost.error.evidence.isprintable()
    assert len(lost.error.evidence) < 300
    assert ([], {}, None) == (kept, link.lost_shims, link.snapshot(1).stopped or None)


@pytest.mark.parametrize(
    "name",
    [
        contract.stdout_file(OWN),
        contract.stderr_file(OWN),
        contract.times_file(OWN),
        contract.stacks_file(OWN),
        contract.progress_file(OWN),
        contract.traffic_file(OWN),
        contract.trace_file(OWN),
        profile_file(OWN),
        contract.error_file(OWN),
        contract.exit_file(OWN),
        contract.recorder_file(OWN),
        SHARD,
        SHARD.replace(".json", ".safetensors"),
    ],
)
def test_every_file_that_a_rank_writes_is_taken_from_its_own_host(name):
    header = contract.read_frame(iter_bytes(piece(name)))[0]
    found = parse_agent_frame(header, ranks=[OWN], last_step=100)
    assert isinstance(found, FilePiece), found
    assert not isinstance(parse_agent_frame(header, ranks=[FOREIGN], last_step=100), FilePiece)


def iter_bytes(data):
    """A function that reads from these bytes, as `read_frame` wants one."""
    rest = bytearray(data)

    def read(most):
        part = bytes(rest[:most])
        del rest[:most]
        return part

    return read


def test_frames_of_any_size_that_is_claimed_take_little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for header in (b"[" + b"{}," * 5_000_000 + b"0]", b'{"kind": "' + "\U0001f600".encode() * 3_000_000 + b'"}'):
        try:
            contract.read_frame(iter_bytes(raw_frame(header)))
        except ValueError as error:
            assert "not a frame" in str(error)  # noqa: PT017 - the second one is a frame
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 150


def test_a_hosts_clock_moves_no_record_out_of_time():
    record = StepDone(time=1_790_000_000.0, step=1, values={})
    assert 0.0 == moved_back(record, 1e11).time
    assert 1e11 == moved_back(record, -1e11).time


def tried(host):
    """The interpreters that a host was asked to try first, of all commands that it was sent."""
    return {word for command in host.commands for word in command if word.startswith("/opt/")}


def test_the_interpreter_that_a_host_reports_is_started_on_that_host_only(tmp_path):
    hosts = [HostileHost(name, lambda: b"") for name in ("one", "two")]
    arguments = {host.name: {**LEASE, "ranks": [number]} for number, host in enumerate(hosts)}
    pythons = {host.name: f"/opt/{host.name}/python" for host in hosts}
    starter = AgentStarter(
        [host.transport for host in hosts],
        arguments,
        last_step=0,
        folder=RunFolder("run", tmp_path),
        pythons=pythons,
    )
    found = starter.start_all()
    assert all(isinstance(answer, HostError) for answer in found.values())
    assert [{"/opt/one/python"}, {"/opt/two/python"}] == [{word.rstrip(";") for word in tried(host)} for host in hosts]


def test_the_network_check_tries_on_each_host_only_its_own_interpreter():
    hosts = [HostileHost(name, lambda: b"") for name in ("one", "two")]
    addresses = {host.name: "127.0.0.1" for host in hosts}
    pythons = {host.name: [f"/opt/{host.name}/python"] for host in hosts}
    measure_pairs([host.transport for host in hosts], addresses, pythons=pythons)
    assert [{"/opt/one/python"}, {"/opt/two/python"}] == [{word.rstrip(";") for word in tried(host)} for host in hosts]
