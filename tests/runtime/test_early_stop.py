"""Training ends when validations no longer improve: the same step in every layout, before and after a resume."""

import json
import math

import pytest

from ttlaunch import contract
from ttlaunch.recipe import TrainingConfig
from ttlaunch.runtime.early_stop import EarlyStop
from ttlaunch.runtime.model.losses import perplexity

from .layouts import LAYOUTS, OTHERS, train

# The rate is far too high after a few steps, so the validation loss soon rises.
SMALL = {
    "training_config": {"steps": 40, "batch_size": 4, "micro_batch_size": 1, "validation_interval": 2, "seed": 2}
    | {"validation_sequences": 5, "learning_rate": 0.1, "early_stop_patience": 3, "early_stop_min_delta": 0.05},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
    "checkpoint_config": {"interval": 5},
}


def stop(**keys):
    return EarlyStop(TrainingConfig.model_validate({"validation_interval": 2, "early_stop_patience": 2} | keys))


def observed(early_stop, losses, *, first=0):
    """Whether training is over after each of these validations."""
    found = []
    for at, loss in enumerate(losses):
        early_stop.observe(first + 2 * at, loss)
        found.append(early_stop.is_over)
    return found


def test_training_ends_after_so_many_validations_in_a_row_without_improvement():
    assert [False, False, False, False, True] == observed(stop(), [5.0, 5.1, 4.9, 4.9, 5.0])
    assert [False, False, True] == observed(stop(early_stop_min_delta=0.2), [5.0, 4.9, 4.85])
    assert [False, False, False] == observed(stop(early_stop_min_delta=0.2), [5.0, 4.9, 4.7])
    assert [False, True] == observed(stop(early_stop_patience=1), [5.0, math.nan])
    assert [False] * 4 == observed(stop(early_stop_patience=None), [1.0, 2.0, 3.0, 4.0])


def test_the_reason_says_how_often_and_by_how_much():
    early_stop = stop(early_stop_patience=1)
    observed(early_stop, [5.0, 5.1])
    assert "after step 2: the validation loss has not fallen in 1 validation" == early_stop.reason()


def test_a_validation_counts_once_and_only_where_every_run_has_one():
    """A run that goes on from step 3 validates there, which an uninterrupted one does not."""
    early_stop = stop()
    assert [False, False] == observed(early_stop, [5.0, 6.0])
    early_stop.observe(2, 7.0)
    early_stop.observe(3, 7.0)
    assert not early_stop.is_over
    early_stop.observe(3, 7.0, is_last=True)
    assert early_stop.is_over


def test_its_state_survives_a_checkpoint_and_a_message():
    before = stop()
    observed(before, [5.0, 6.0])
    stored = json.loads(json.dumps(before.state()))
    training = TrainingConfig.model_validate({"validation_interval": 2, "early_stop_patience": 2})
    restored, told = EarlyStop(training, state=stored), EarlyStop(training)
    told.take(before.values())
    for after in (restored, told):
        assert before.state() == after.state()
        assert [True] == observed(after, [5.5], first=4)
    assert EarlyStop(None).state() is None


def strict_json(text):
    """What a reader of any language makes of it: JSON has no infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_before_any_improvement_its_state_is_json_too_and_means_the_same():
    before = stop()
    observed(before, [math.nan])
    stored = strict_json(json.dumps(before.state()))
    assert {"best": None, "misses": 1, "step": 0} == stored
    after = EarlyStop(TrainingConfig.model_validate({"validation_interval": 2, "early_stop_patience": 2}), state=stored)
    assert [math.inf, 1.0, 0.0] == after.values()
    assert [False, False, True] == observed(after, [5.0, 5.0, 5.0], first=2)


def test_perplexity_is_the_exponential_of_the_loss():
    """D24."""
    assert math.exp(2.5) == perplexity(2.5)
    assert math.inf == perplexity(1000.0)
    assert math.isnan(perplexity(math.nan))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train("single", tmp_path_factory.mktemp("alone") / "run", SMALL, data=None, saves=True)


def written(run):
    """The steps of the checkpoints that ranks have written, and the state that each carries."""
    found = {}
    for path in (run.run_dir / contract.CHECKPOINTS_DIR).glob("step-*.tmp/*.json"):
        record = json.loads(path.read_text())
        found.setdefault(record["step"], []).append(record["state"])
    return found


def last_step(run):
    return max(record["step"] for record in run.records(contract.KIND_STEP))


def test_the_last_step_of_an_early_end_has_a_validation_and_a_checkpoint(alone):
    last = last_step(alone)
    assert 6 < last < 40
    losses = alone.by_step(contract.KIND_VALIDATION, "loss")
    assert last == max(losses)
    assert all(loss >= min(losses.values()) - 0.05 for loss in losses.values())
    assert last in written(alone)
    expected = f"after step {last}: the validation loss has not fallen by 0.05 or more in 3 validations"
    assert expected == alone.result("stopped early")
    perplexities = alone.by_step(contract.KIND_VALIDATION, "perplexity")
    assert {step: math.exp(loss) for step, loss in losses.items()} == perplexities


@pytest.mark.parametrize("layout", OTHERS)
def test_every_layout_ends_at_the_same_step_with_the_same_bits(alone, tmp_path, layout):
    """No rank waits for one that has stopped, no message is left over, and every owner's checkpoint says the same."""
    found = train(layout, tmp_path / "run", SMALL, data=None, saves=True)
    assert alone.sha256 == found.sha256
    assert alone.result("stopped early") == found.result("stopped early")
    assert {last_step(alone)} == {
        max(record["step"] for record in found.records(contract.KIND_STEP) if record["rank"] == rank)
        for rank in range(found.size)
    }
    assert alone.by_step(contract.KIND_VALIDATION, "loss") == found.by_step(contract.KIND_VALIDATION, "loss")
    expected, states = written(alone), written(found)
    assert expected.keys() == states.keys()
    for step, (state,) in expected.items():
        assert [state] * len(states[step]) == states[step]


@pytest.mark.parametrize("layout", ["single", "three tiers", "two pipelines"])
def test_a_checkpoint_before_the_first_validation_that_counts_is_json_and_goes_on(tmp_path, layout):
    """Early stopping is switched on with the resume at step 4, where the validation is one that no whole run has."""
    training = (
        SMALL["training_config"]
        | {"validation_interval": 3, "steps": 20, "learning_rate": 1e-6}
        | {"early_stop_patience": 2}
    )
    config = SMALL | {"training_config": training, "checkpoint_config": {"interval": 1}}
    off = config | {"training_config": training | {"early_stop_patience": None, "steps": 4}}
    first = train("single", tmp_path / "first", off, data=None, saves=True)
    second = train(layout, tmp_path / "second", config, data=None, saves=True, start=start_at(first, 4))
    assert None is start_at(second, 5)["state"]["early_stop"]["best"]
    third = train("single", tmp_path / "third", config, data=None, start=start_at(second, 5))
    assert second.sha256 == third.sha256
    assert second.result("stopped early") == third.result("stopped early") is not None


def start_at(run, step):
    """What a plan says of a run's unfinished checkpoint."""
    folder = run.run_dir / f"{contract.checkpoint_dir(step)}.tmp"
    records = {int(p.stem.removeprefix("rank-")): strict_json(p.read_text()) for p in folder.glob("*.json")}
    files = [
        {"path": str(folder / contract.shard_file(r)), "sha256": record["sha256"]} for r, record in records.items()
    ]
    return {"origin": "here", "step": step, "state": records[min(records)]["state"], "files": files}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_goes_on_ends_where_the_uninterrupted_one_did(alone, tmp_path, layout):
    """The checkpoint of step 5 is between two validations."""
    found = train(layout, tmp_path / "run", SMALL, data=None, start=start_at(alone, 5))
    assert alone.sha256 == found.sha256
    assert alone.result("stopped early") == found.result("stopped early")
