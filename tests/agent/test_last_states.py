"""A host lists the states that a run's workers saved, sends them in pieces, and removes them; only regular files are opened."""

import io
import sys

import pytest

from ttlaunch import contract
from ttlaunch.agent import last_states


class Output:
    def __init__(self):
        self.buffer = io.BytesIO()


@pytest.fixture
def ask(tmp_path, monkeypatch):
    def ask(**asked):
        monkeypatch.setattr(sys, "stdout", Output())
        assert 0 == last_states.main({"remote_folder": str(tmp_path), "run_id": "a", **asked})
        sys.stdout.buffer.seek(0)
        frames = []
        while frame := contract.read_frame(sys.stdout.buffer.read):
            frames.append(frame)
        return frames

    return ask


@pytest.fixture
def states(tmp_path):
    folder = tmp_path / "runs" / "a" / contract.LAST_STATES_DIR
    for name in ("step-9.tmp", "step-8", "step-10"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rank-2.json").write_text(name)
        (folder / name / "rank-2.safetensors").write_text("x" * 2_000_000)
    return folder


def test_the_list_has_the_newest_first_and_what_was_not_finished(ask, states):
    assert [
        ({"kind": "state", "step": 10, "number": 2}, b"step-10"),
        ({"kind": "state", "step": 8, "number": 2}, b"step-8"),
        ({"kind": "listed", "unfinished": [9], "is_running": False}, b""),
    ] == ask(ask="list", wait_s=0)


def test_a_run_without_states_has_an_empty_list(ask):
    assert [({"kind": "listed", "unfinished": [], "is_running": False}, b"")] == ask(ask="list", wait_s=0)


def test_a_shard_comes_in_pieces(ask, states):
    *pieces, (last, _) = ask(ask="send", step=10, number=2)
    assert {"kind": "sent"} == last
    assert b"x" * 2_000_000 == b"".join(body for _, body in pieces)
    assert len(pieces) > 1


@pytest.mark.parametrize("place", ["link", "folder", "nothing"])
def test_what_is_no_regular_file_is_not_sent(ask, states, place):
    shard = states / "step-8" / "rank-2.safetensors"
    shard.unlink()
    if place == "link":
        shard.symlink_to(states / "step-10" / "rank-2.safetensors")
    if place == "folder":
        shard.mkdir()
    [(answer, _)] = ask(ask="send", step=8, number=2)
    assert ("unreadable", True) == (answer["kind"], str(shard) in answer["reason"])


def test_all_states_are_removed_at_once(ask, states):
    assert [({"kind": "removed"}, b"")] == ask(ask="remove")
    assert not states.exists()
