"""Data without a file (E1-E4): the same for any ranks, as hard as a formula says, and no training gets below that."""

import math
from collections import Counter

import numpy as np
import pytest

from ttlaunch.recipe import DataConfig, TrainingFile
from ttlaunch.runtime.context import build_data
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.data.synthetic import MarkovChain
from ttlaunch.spec.recipe.corpus import CorpusError
from ttlaunch.spec.recipe.data import check_data, default_path, read_data

from .layouts import train
from .pipelines import start_from
from .test_shares_of_data import Rank

STEPS, HALF = 60, 30
DRAWN = {"source": "markov", "vocabulary": 8, "branching": 2, "sequences": 400}
FROZEN = [[0, 0, 7, 6, 7, 6, 7, 6, 7, 6], [6, 4, 6, 2, 6, 5, 7, 6, 0, 0]]


def config(*, drawn=None, **training):
    return {
        "data_config": DRAWN | (drawn or {}),
        "training_config": {"steps": STEPS, "batch_size": 8, "micro_batch_size": 2, "validation_interval": HALF}
        | {"learning_rate": 2e-2, "validation_sequences": 40}
        | training,
        "transformer_config": {"num_blocks": 1, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
        "checkpoint_config": {"interval": HALF},
    }


def made(cfg):
    cfg = TrainingFile.model_validate(cfg)
    return build_data(read_data(default_path(cfg)), cfg), cfg


def test_sequences_are_frozen():
    """Numbers of a seed must not change with a version of anything, or no run could be repeated."""
    chain = MarkovChain(DataConfig(**DRAWN | {"order": 2, "seed": 7}))
    assert FROZEN == [chain.draw(number, length=10) for number in (0, 1)]
    assert FROZEN[1] == chain.draw(1, length=10)  # whatever was drawn before


@pytest.mark.parametrize("order", [1, 3])
def test_so_many_tokens_follow_all_as_likely(order):
    """Hence the entropy rate is ln b; the counts of each choice are within five standard deviations of equal."""
    chain, branching = MarkovChain(DataConfig(source="markov", vocabulary=5, order=order, branching=3)), 3
    follows = {}
    for number in range(600):
        tokens = chain.draw(number, length=40)
        for at in range(1, len(tokens)):
            context = tuple(tokens[max(0, at - order) : at])
            follows.setdefault(context, Counter())[tokens[at]] += 1
    common = [found for found in follows.values() if found.total() > 60]
    assert len(common) > 4
    assert {branching} == {len(found) for found in common}
    for found in common:
        deviation = math.sqrt(found.total() * (1 / branching) * (1 - 1 / branching))
        assert all(abs(count - found.total() / branching) < 5 * deviation for count in found.values())
    assert 5 == len({tokens[0] for tokens in (chain.draw(number, length=2) for number in range(99))})


def test_nobody_who_has_not_seen_a_sequence_predicts_it_better():
    """The best of what training shows, counted; on sequences of validations its loss is just above ln b."""
    data, cfg = made(config(drawn={"sequences": 400}, validation_sequences=200))
    counts = np.full((8, 8), 1e-3)
    for step in range(1, 51):
        for index in range(4):
            _, x_BT, y_BT = data.training_batch(step, index)
            np.add.at(counts, (x_BT.numpy(), y_BT.numpy()), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    batches = [data.validation_batch(index) for index in range(data.validation_micro_batches)]
    loss = np.mean([-np.log(chances[x_BT.numpy(), y_BT.numpy()]) for _, x_BT, y_BT in batches])
    assert math.log(cfg.data_config.branching) < loss < 1.005 * math.log(cfg.data_config.branching)


def test_workers_share_a_step_without_a_file():
    data, cfg = made(config())
    alone = [row for _, x_BT, _ in micro_batches(cfg, Rank(0, data), 3) for row in x_BT.tolist()]
    shares = [list(micro_batches(cfg, Rank(rank, made(config())[0]), 3, among=(0, 1, 2))) for rank in range(3)]
    assert alone == [row for share in shares for _, x_BT, _ in share for row in x_BT.tolist()]
    assert (400, 40 * 16, 8) == (data.training_sequences, data.validation_tokens, data.vocabulary)


def test_training_comes_to_the_entropy_and_resumes_to_the_same_bits(tmp_path):
    """E1-E4: in one process, among workers, and from a checkpoint; the loss falls to ln b and never below it."""
    alone = train("single", tmp_path / "alone", config(), data=None, saves=True)
    losses = alone.by_step("validation", "loss")
    best = math.log(DRAWN["branching"])
    assert losses[0] > 0.95 * math.log(DRAWN["vocabulary"])
    assert best < losses[STEPS] < 1.1 * best
    start, _ = start_from(alone, step=HALF)
    for layout, begin in (("data parallel", None), ("two tiers", start)):
        found = train(layout, tmp_path / layout, config(), data=None, start=begin)
        assert alone.sha256 == found.sha256
        assert losses[STEPS] == found.by_step("validation", "loss")[STEPS]


def test_an_epoch_that_fills_no_step_is_refused():
    cfg = TrainingFile.model_validate(config(drawn={"sequences": 3}, num_epochs=2))
    with pytest.raises(CorpusError, match=r"has 3 training sequences; num_epochs 2 × 3 = 6, and one step needs 8"):
        check_data(read_data(default_path(cfg)), cfg)
