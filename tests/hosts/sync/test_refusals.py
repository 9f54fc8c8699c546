"""What a host's refusal means, word for word."""

import pytest

from ttlaunch.agent.unpack import Building, Refused
from ttlaunch.errors import HostError, SyncError, Trouble
from ttlaunch.hosts.sync.refusals import explain_loss, explain_refusal
from ttlaunch.records.host_scripts import SyncRefusal

HERE = "/home/u/.ttlaunch/releases"


@pytest.mark.parametrize(
    ("facts", "code", "message"),
    [
        (
            {"why": "space", "free": 1_500_000, "needed": 52_000_000, "path": HERE},
            "S009",
            f"the disk of node1 is too full: 1.5 MB free in {HERE}, 52.0 MB needed",
        ),
        (
            {"why": "inodes", "free": 12, "needed": 2000, "path": HERE},
            "S009",
            f"the disk of node1 is too full: room for 12 more files in {HERE}, 2000 needed",
        ),
        (
            {"why": "full", "reason": "disk quota exceeded", "path": HERE},
            "S009",
            f"the disk of node1 is full: disk quota exceeded at {HERE}",
        ),
        (
            {"why": "denied", "reason": "permission denied", "path": HERE},
            "S010",
            f"{HERE} on node1 cannot be written: permission denied",
        ),
        (
            {"why": "case", "names": ["project/Model.py", "project/model.py"], "path": HERE},
            "S008",
            "node1 takes `Model.py` and `model.py` for one file",
        ),
        (
            {"why": "name", "reason": "file name too long", "path": "x" * 20},
            "S015",
            f"node1 cannot have a file named {'x' * 20}: file name too long",
        ),
        ({"why": "damaged", "path": "a.py"}, "S013", "a.py came to node1 with other content than was sent"),
        (
            {"why": "other", "reason": "input/output error", "path": HERE},
            "S016",
            f"node1 could not take the code in: input/output error at {HERE}",
        ),
    ],
    ids=lambda value: value["why"] if isinstance(value, dict) else "",
)
def test_what_a_host_says_becomes_a_clause_with_the_wrong_value_in_it(facts, code, message):
    error = explain_refusal("node1", SyncRefusal(**facts))
    assert (code, message) == (error.code, error.evidence)


@pytest.mark.parametrize(
    ("trouble", "evidence", "code", "message"),
    [
        (
            Trouble.LOST,
            "the host hung up",
            "S011",
            "node1 was lost while code was copied to it: the host hung up",
        ),
        (
            Trouble.TIMED_OUT,
            "no answer from a command within 12 s",
            "S011",
            "node1 was lost while code was copied to it: no answer from a command within 12 s",
        ),
        (
            Trouble.SCRIPT,
            "our script on it broke: MemoryError",
            "S016",
            "node1 could not take the code in: our script on it broke: MemoryError",
        ),
    ],
)
def test_a_talk_that_breaks_off_is_a_failed_sync(trouble, evidence, code, message):
    error = explain_loss(HostError("node1", trouble, evidence))
    assert isinstance(error, SyncError)
    assert (code, message) == (error.code, error.evidence)


def test_a_host_without_python_is_not_ready_for_anything():
    error = HostError("node1", Trouble.NO_PYTHON, "no Python 3.9 or newer")
    assert error is explain_loss(error)


def test_names_that_the_file_system_takes_for_one_are_refused(tmp_path):
    """A file of the other letter case is there beforehand: so a file system looks that does not tell them apart."""
    building = Building(bytes(tmp_path / "release"), [], [], incoming=bytes(tmp_path))
    names = [b"project/Model.py", b"project/model.py"]
    building._check_case(names)
    (tmp_path / "pROBE").write_text("")
    with pytest.raises(Refused) as raised:
        building._check_case(names)
    assert ("case", ["project/Model.py", "project/model.py"]) == (
        raised.value.facts["why"],
        raised.value.facts["names"],
    )


def test_names_that_differ_in_case_arrive_where_they_are_told_apart(project, release_of, host):
    for name in ("Model.py", "model.py"):
        (project / name).write_text(name)
    host.take(release_of(project))
    assert ["Model.py", "model.py"] == sorted(path.read_text() for path in host.current.iterdir())


def test_a_name_that_is_too_long_for_the_host_is_named(project, release_of, host):
    (project / ("x" * 200)).write_text("")
    host.folder = host.folder / "/".join(["y" * 200] * 20)
    with pytest.raises(SyncError) as raised:
        host.take(release_of(project))
    assert ("S015", True) == (raised.value.code, raised.value.evidence.endswith(": file name too long"))
