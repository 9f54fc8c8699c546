"""R011: training that ends with losses that are no numbers has failed, in a run and in a simulation; the first step is named."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tests.forked import FORKED_LINE
from tests.records.written import progress
from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.failures.divergence import divergence
from ttlaunch.running.watch import RankState, fold
from ttlaunch.runtime.telemetry.records import ProgressWriter

FP16 = {"training_config": {"precision": "fp16"}}
DIVERGES = "--set training_config.learning_rate=1e30 --set training_config.steps=6 --set training_config.batch_size=2"
SMALL = (
    "--set training_config.micro_batch_size=1 --set transformer_config.embedding_dim=16 "
    "--set transformer_config.num_heads=2 --set transformer_config.max_sequence_length=16"
)


def told(losses, validations, config=None, *, others=()):
    """What is said of rank 1, by its losses of steps 1, 2, … and by its validations; `others` are losses of rank 0."""
    ranks = [RankState(RankRow(rank, "box", rank, "worker")) for rank in range(2)]
    for state, steps in zip(ranks, (others, losses), strict=True):
        for step, loss in enumerate(steps, start=1):
            fold(state, progress({"kind": "step", "time": float(step), "step": step, "loss": loss}))
    for step, loss in validations.items():
        fold(ranks[1], progress({"kind": "validation", "time": 1.0, "step": step, "loss": loss}))
    failure = divergence(ranks, config)
    return failure and (
        failure.code,
        failure.rank,
        failure.message.partition(") ")[2].replace(": training has diverged", ""),
    )


@pytest.mark.parametrize(
    ("losses", "validations", "said"),
    [
        ([2.0, 1.0], {0: 3.0, 2: 2.0}, None),
        ([2.0, 1.0], {0: 3.0, 2: math.nan}, "a validation loss of nan after step 2"),
        ([2.0, math.inf, math.nan], {0: 3.0, 2: math.nan, 3: math.nan}, "a training loss of inf in step 2"),
        ([2.0, 1.0, math.nan], {0: 3.0, 2: math.nan, 3: math.nan}, "a validation loss of nan after step 2"),
        ([2.0, math.nan, math.nan], {0: 3.0}, "a training loss of nan in step 2"),
        ([math.nan, 1.0, -math.inf], {}, "a training loss of -inf in step 3"),
        ([2.0, math.nan, 1.0], {0: math.nan, 3: 2.0}, None),
        ([2.0, 1.0], {0: math.nan, 1: 2.0, 2: math.inf}, "a validation loss of inf after step 2"),
    ],
)
def test_the_first_loss_is_named_after_which_none_is_a_number(losses, validations, said):
    assert (said and ("R011", 1, f"reported {said}")) == told(losses, validations)


@pytest.mark.parametrize(
    ("losses", "validations", "is_sound"),
    [
        ([2.0, math.nan, 1.0], {}, True),
        ([2.0, 1.0, math.inf], {}, True),
        ([2.0, math.inf, math.inf], {3: 2.0}, True),
        ([2.0, math.inf, math.inf], {1: 2.0}, False),
        ([2.0, 1.0, math.inf], {3: math.nan}, False),
    ],
)
def test_a_skipped_step_of_fp16_is_no_divergence(losses, validations, is_sound):
    assert is_sound == (told(losses, validations, FP16) is None)


def test_the_rank_that_saw_it_first_is_named():
    assert ("R011", 0, "reported a training loss of nan in step 1") == told(
        [2.0, math.nan], {}, others=[math.nan, math.nan]
    )


def spikes(losses):
    state = RankState(RankRow(0, "box", 0, "worker"))
    for step, loss in enumerate(losses, start=1):
        fold(state, progress({"kind": "step", "time": float(step), "step": step, "loss": loss}))
    return [spike.step for spike in state.spikes.found]


USUAL = [2.0 + 0.01 * (step % 5) for step in range(32)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([*USUAL, 4.0, 2.0], [33]),
        ([*USUAL, 2.9, 2.0], []),  # not half of the median more
        ([*USUAL, math.nan, math.inf, 2.0], []),  # no spike, but R011
        ([*USUAL, 4.0, 3.9, 2.0, 9.0], [33, 36]),
        ([*USUAL[1:], 4.0], []),  # too few to compare with
        ([2.0 + (step % 2) for step in range(40)] + [6.0], []),  # such a training jumps always
        ([5.0 - 0.1 * step for step in range(40)], []),
    ],
)
def test_a_loss_far_above_the_median_of_those_before_is_a_spike(losses, expected):
    assert expected == spikes(losses)


@pytest.mark.parametrize("verb", [pytest.param("run", marks=pytest.mark.mpi), "simulate"])
def test_a_run_and_a_simulation_that_diverge_fail_alike(ttlaunch, verb):
    answer = ttlaunch(
        f"{verb} hierarchical_parallel --ranks 3 {DIVERGES} {SMALL} {FORKED_LINE if verb == 'run' else ''} --format json"
    )
    report = json.loads(answer.stdout)
    assert (1, "failed", "R011") == (answer.status, report["status"], report["failure"]["code"])
    assert 2 == report["failure"]["step"]
    assert "had a loss of nan in micro-batch 0: training has diverged" == report["failure"]["cause"]
    assert (verb == "run") == ("ttlaunch replay" in (report["failure"]["next_step"] or ""))


@pytest.mark.parametrize("verb", [pytest.param("run", marks=pytest.mark.mpi), "simulate"])
def test_only_what_broke_is_said_of_a_run_that_failed(ttlaunch, here, verb):
    """A formula that says nothing is a warning for each operation, where there is nothing worse to say."""
    shutil.copytree(Path(__file__).parents[2] / "recipes/hierarchical_parallel", here / "mine")
    recipe = here / "mine/recipe.py"
    recipe.write_text(recipe.read_text().replace("traffic=traffic", "traffic=lambda config, ranks: []"))
    line = f"{verb} ./mine --ranks 3 {DIVERGES} {SMALL} {FORKED_LINE if verb == 'run' else ''} --format concise"
    assert {"R011"} == set(re.findall(r"R0[0-9]{2}", ttlaunch(line).stderr))
    sound = ttlaunch(line.replace("1e30", "0.001"))
    assert (0, {"R045"}) == (sound.status, set(re.findall(r"R0[0-9]{2}", sound.stderr)))


def test_a_loss_that_is_no_number_is_strict_json_and_comes_back(tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    writer = ProgressWriter(tmp_path, 0)
    writer.write(contract.KIND_VALIDATION, step=1, loss=math.nan, perplexity=math.inf, norms={"head": -math.inf})
    writer.close()
    line = (tmp_path / contract.progress_file(0)).read_text()
    strict = json.loads(line, parse_constant=refuse)
    assert ("nan", "inf", {"head": "-inf"}) == tuple(strict[key] for key in ("loss", "perplexity", "norms"))
    record = contract.read_record(line)
    assert [True, math.inf, -math.inf] == [math.isnan(record["loss"]), record["perplexity"], record["norms"]["head"]]
    assert [None, None] == [contract.read_record(line) for line in ("{", "[1]")]
