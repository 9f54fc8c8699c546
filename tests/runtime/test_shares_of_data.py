"""C13 and bug 22: whatever the number of ranks, all samples are used once an epoch, by one rank, in equally many steps."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.recipe import TrainingFile
from ttlaunch.runtime.context import build_data
from ttlaunch.runtime.data.batches import micro_batches, validation_micro_batches
from ttlaunch.spec.recipe.corpus import Corpus

SIDE = 2


def numbered_rows(count):
    """Images that tell which one they are, so that none is taken for another."""
    digits = [(at // 16**3 % 16, at // 16**2 % 16, at // 16 % 16, at % 16) for at in range(count)]
    text = "\n".join(",".join(map(str, (*pixels, at % 7))) for at, pixels in enumerate(digits))
    return Corpus("rows", (text + "\n15,15,15,15,0").encode(), "0" * 64)


class Rank:
    """The part of a context that data needs."""

    device, elastic = "cpu", None

    def __init__(self, rank, data):
        self.rank, self._data = rank, data

    def data(self, cfg):
        return self._data


@given(
    images=st.integers(30, 60),
    batch=st.integers(1, 9),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 2),
    workers=st.integers(1, 6),
    epochs=st.integers(1, 3),
)
def test_shards_are_disjoint_and_complete(images, batch, micro, accumulation, workers, epochs):
    """C13: every step's samples are the ranks' together, and an epoch has each sample once, also with ragged blocks."""
    training = {"model_type": "conv", "batch_size": batch, "micro_batch_size": min(micro, batch), "num_epochs": epochs}
    training |= {"gradient_accumulation_steps": accumulation, "validation_fraction": 0.3, "steps": 10**6}
    cfg = TrainingFile.model_validate(
        {"training_config": training, "transformer_config": {"max_sequence_length": SIDE**2}}
    )
    data = [build_data(numbered_rows(images), cfg) for _ in range(workers)]
    count = images + 1 - int((images + 1) * 0.3)
    per_step = batch * accumulation
    assert {epochs * count // per_step} == {each.total_steps for each in data}  # bug 22: none has a step more
    ranks, seen = tuple(range(workers)), []
    for step in range(1, data[0].total_steps + 1):
        shares = [list(micro_batches(cfg, Rank(rank, data[rank]), step, among=ranks)) for rank in ranks]
        indices = [index for share in shares for index, _, _ in share]
        assert list(range(math.ceil(per_step / min(micro, batch)))) == indices
        seen += [tuple(pixels.tolist()) for share in shares for _, x_BT, _ in share for pixels in x_BT]
    assert data[0].total_steps * per_step == len(seen)
    for epoch in range(epochs):
        of_epoch = seen[epoch * count : (epoch + 1) * count]
        assert len(set(of_epoch)) == len(of_epoch)


@given(sequences=st.integers(1, 12), workers=st.integers(1, 9))
def test_a_validation_is_shared_without_a_gap(sequences, workers):
    """Also where there are more ranks than micro-batches, so that some have nothing to do."""
    training = {"model_type": "conv", "batch_size": 4, "micro_batch_size": 2, "validation_sequences": sequences}
    cfg = TrainingFile.model_validate(
        {"training_config": training, "transformer_config": {"max_sequence_length": SIDE**2}}
    )
    data, ranks = build_data(numbered_rows(60), cfg), tuple(range(workers))
    found = [index for rank in ranks for index, _, _ in validation_micro_batches(cfg, Rank(rank, data), among=ranks)]
    assert list(range(data.validation_micro_batches)) == found


def test_a_rank_takes_the_micro_batches_that_it_is_given_whatever_its_share():
    training = {"model_type": "conv", "batch_size": 8, "micro_batch_size": 2}
    cfg = TrainingFile.model_validate(
        {"training_config": training, "transformer_config": {"max_sequence_length": SIDE**2}}
    )
    rank = Rank(0, build_data(numbered_rows(30), cfg))
    whole = [(index, x_BT.tolist()) for index, x_BT, _ in micro_batches(cfg, rank, 1)]
    given = [(index, x_BT.tolist()) for index, x_BT, _ in micro_batches(cfg, rank, 1, among=(0, 1), indices=[3, 1])]
    assert [whole[3], whole[1]] == given
