"""What a replay shows is cut into pieces that can be read, and joined to what it was."""

import json

import pytest

from ttlaunch.lab.replay import _read_shown
from ttlaunch.records import replay as records
from ttlaunch.records.replay import (
    NamedTensor,
    PassTensor,
    ReplayEnd,
    ShownBatch,
    ShownRank,
    TensorFacts,
    as_json,
    cut,
    join,
)

FACTS = TensorFacts(
    shape=(2,), dtype="float32", sha256="ab" * 32, norm=1.0, lowest=0.0, highest=1.0, nans=0, infs=0, histogram=(1, 1)
)


def shown_rank(rank, tensors):
    """A rank with this number of activations, and of all else a few."""
    passes = tuple(PassTensor(micro_batch=at % 3, name=f"layer {at}", facts=FACTS) for at in range(tensors))
    named = tuple(NamedTensor(name=f"tensor {at}", facts=FACTS) for at in range(2))
    batch = ShownBatch(index=0, inputs_sha256="a", targets_sha256="b", shape=(1, 2), texts=("text",))
    return ShownRank(
        rank=rank,
        role="worker",
        is_complete=True,
        batches=(batch,),
        activations=passes,
        micro_gradients=passes[:1],
        gradients=named,
        tensors=named,
    )


@pytest.fixture
def end(monkeypatch):
    monkeypatch.setattr(records, "MOST_IN_PIECE", 3)
    return ReplayEnd(step=4, ranks=(shown_rank(0, 7), shown_rank(1, 0)))


def test_pieces_are_short_and_together_what_was_cut(end):
    pieces = list(cut(end))
    assert [3, 3, 1, 0] == [len(one.ranks[0].activations) for one in pieces]
    assert end == join(pieces)
    assert join([]) is None


def test_a_piece_that_cannot_be_read_is_said_and_those_before_it_are_shown(end, tmp_path):
    for number, piece in enumerate(cut(end)):
        (tmp_path / records.file_of_piece(number)).write_text(json.dumps(as_json(piece)), encoding="utf-8")
    assert (end, None) == _read_shown(tmp_path)
    (tmp_path / "replay-1.json").write_text("{}", encoding="utf-8")
    found, problem = _read_shown(tmp_path)
    assert (3, 1) == (len(found.ranks[0].activations), len(found.ranks))
    assert problem.startswith("replay-1.json: ")
