"""What scripts on hosts answer: a typed value, or a `HostError` that names the host; never an exception of another kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.doctor.facts import Clock, HostFacts, facts_as_json, parse_facts
from ttlaunch.hosts.prepare.kind import parse_kind
from ttlaunch.hosts.sync.refusals import explain_refusal
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.memory import MemoryTransport
from ttlaunch.records import host_scripts
from ttlaunch.records.parser import BadRecord, parse

ANSWERS = [
    (host_scripts.HostClock, {"kind": "clock", "time": 1.5}),
    (host_scripts.Listening, {"kind": "listening", "port": 40000, "problem": None}),
    (host_scripts.Reached, {"kind": "reached", "results": [["node1", 0.001, None], ["node2", None, "refused"]]}),
    (host_scripts.Measured, {"kind": "measured", "latency_s": 1e-4, "bytes_per_s": 1e9}),
    (host_scripts.SyncMessage, {"kind": "want", "id": "5:7", "files": 3, "bytes": 1000}),
    (
        host_scripts.SyncEnd,
        {"kind": "done", "folder": "/f", "there": True, "repaired": [], "pruned": ["a"], "differing": [], "data": {}},
    ),
    (host_scripts.SyncRefusal, {"why": "space", "path": "/f", "needed": 5, "free": 3}),
    (host_scripts.SyncRefusal, {"why": "case", "names": ["a/B", "a/b"]}),
    (
        host_scripts.FoundPythons,
        {"base": {"path": "/p", "version": "3.11.2", "libc": "glibc 2.36"}, "found": [{"path": "/p", "version": None}]},
    ),
    (host_scripts.InstallMessage, {"kind": "need", "wheels": {"a": 0}}),
    (
        host_scripts.EnvironmentAnswer,
        {"kind": "ready", "made": True, "environment": "/e", "python": "3.11.2", "wheels": []},
    ),
    (host_scripts.LeftOver, {"processes": [{"pid": 5, "name": "x"}], "folders": ["/f"], "clean_after_s": None}),
]
FACTS = {
    "hostname": "a",
    "user": "me",
    "uid": 1000,
    "home": "/h",
    "machine": "m",
    "kernel": "6.1",
    "cpu": {"model": "x", "architecture": "x86_64", "count": 8, "usable": 7.5, "flags": ["avx2"]},
    "memory": {"total_bytes": 5, "available_bytes": 4},
    "limits": {"nofile": [1024, None]},
    "interfaces": [
        {"name": "eth0", "address": "10.0.0.5/24", "mtu": 1500, "up": True, "speed_mbit": None, "bridge": False}
    ],
    "python": {"executable": "/p", "version": [3, 11, 2], "prefix": "/", "packages": {"torch": "2"}, "tried": ["/p"]},
    "names": {"node1": ["10.0.0.6"]},
    "leftovers": [{"pid": 5, "run_id": "r", "age_s": 1.5, "command": "c"}],
    "unanswered": ["devices"],
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize(("cls", "answer"), ANSWERS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_scripts_answer_today_is_read(cls, answer):
    assert cls is type(parse(cls, answer))


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(ANSWERS), st.data())
def test_an_answer_with_anything_in_a_place_is_typed_or_refused(pair, data):
    cls, answer = pair
    name = data.draw(st.sampled_from(sorted(answer)))
    found = parse(cls, {**answer, name: data.draw(ANYTHING)})
    assert isinstance(found, (cls, BadRecord))
    if isinstance(found, host_scripts.SyncRefusal):
        assert explain_refusal("node1", found).evidence
    if isinstance(found, host_scripts.FoundPythons) and found.base is not None:
        assert len(parse_kind(found.base).platforms()) < 20_000


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(sorted(FACTS)), ANYTHING)
def test_facts_with_anything_in_a_place_are_facts_or_name_it(name, value):
    found = parse(HostFacts, {**FACTS, name: value})
    assert isinstance(found, HostFacts) or found.reason.startswith(f"`{name}")


def test_facts_for_other_programs_are_what_the_host_said():
    told = facts_as_json(parse_facts(FACTS, clock=Clock(0.0, 0.5)))
    assert {"least_s": 0.0, "most_s": 0.5} == told["clock"]
    assert FACTS == {name: told[name] for name in FACTS}


def test_an_address_that_is_none_is_named():
    wrong = {**FACTS, "interfaces": [{**FACTS["interfaces"][0], "address": "10.0.0.5/99"}]}
    with pytest.raises(ValueError, match=r"`interfaces\.0\.address` is '10\.0\.0\.5/99', expected an IPv4Interface"):
        parse_facts(wrong, clock=Clock(0.0, 0.0))


def test_a_host_that_answers_something_else_is_named():
    def talk(streams):
        streams.write(contract.pack_frame({"kind": "listening", "port": "high", "problem": None}))
        return 0

    process = MemoryTransport("metal-03", {"x": talk}).start("x", timeout_s=5.0)
    with pytest.raises(HostError) as caught:
        FrameStream("metal-03", process).answer(host_scripts.Listening, timeout_s=5.0)
    assert ("metal-03", Trouble.SCRIPT) == (caught.value.host, caught.value.trouble)
    assert caught.value.evidence.startswith("what came from it is no answer: `port` is 'high', expected a whole number")
