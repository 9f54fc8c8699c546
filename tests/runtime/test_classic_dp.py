"""D4 to D6: `classic_dp` in one process: bits, bounds and statistics against the order of events; where sends are synchronous."""

import pytest
import torch

from tests.runtime.layouts import train_recipe
from tests.runtime.test_resume_layouts import start_of
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.runtime import simulate
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.staleness.exchange import BoundedMeans
from ttlaunch.runtime.stop_order import StopOrder

PLAN = {"hash": "h", "recipe": {"name": "r"}, "layout": "l", "world_size": 64, "config": {}, "data": None}


def config(bound, *, steps=6, interval=None, damping=None, **training):
    small = {"steps": steps, "batch_size": 5, "micro_batch_size": 1, "validation_sequences": 3}
    classic = {"staleness_bound": bound} | ({} if damping is None else {"staleness_damping": damping})
    return {
        "training_config": small | {"validation_interval": 1000} | training,
        "transformer_config": {"num_blocks": 1, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
        | {"dropout_prob": 0.1},
        "scheduler_config": {"type": "cosine", "warmup_steps": 2},
        "checkpoint_config": {"interval": interval},
        "classic_dp_config": classic,
    }


@pytest.fixture
def train(tmp_path):
    """`train(workers, bound, …)`: 0 workers are one process."""

    def run(workers, bound, *, saves=False, start=None, **settings):
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        roles = ["worker"] * workers or ["trainer"]
        return train_recipe("classic_dp", roles, folder, config(bound, **settings), data=None, saves=saves, start=start)

    return run


@pytest.fixture
def events(monkeypatch):
    """What workers did, as (worker, event, step), in the order in which it happened; only one of them runs at a time."""
    found = []

    def watch(name, event, step_of):
        method = getattr(BoundedMeans, name)

        def watched(self, *given):
            answer = method(self, *given)
            assert self._clock.bound + 1 == len(self._rings)  # rooms for gradients
            found.append((self._rings[0]._place, event, step_of(self, answer)))
            return answer

        monkeypatch.setattr(BoundedMeans, name, watched)

    watch("begin", "begin", lambda means, _: means._clock.begun)
    watch("_give", "give", lambda means, _: means._clock.given)
    watch("close", "close", lambda means, _: means._clock.freed)
    watch("_apply", "apply", lambda _, mean: mean.step)
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_without_a_bound_the_bits_are_those_of_one_process(train, workers):
    """D4: K = 0; 5 micro-batches, so blocks of several nodes, with dropout, clipping and a schedule."""
    expected, found = train(0, 0), train(workers, 0)
    assert expected.sha256 == found.sha256
    for key in ("loss", "grad_norm", "learning_rate", "tokens"):
        assert expected.by_step(contract.KIND_STEP, key) == found.by_step(contract.KIND_STEP, key)
    assert (0.0, 0, 0, 6 * workers) == statistics(found)


def statistics(run):
    names = ("staleness average", "staleness maximum", "stale gradients", "gradients")
    return tuple(run.result(name) for name in names)


@pytest.mark.parametrize(("workers", "bound", "steps"), [(2, 1, 9), (3, 1, 7), (3, 4, 13), (2, 30, 5)])
def test_the_bound_holds_and_statistics_are_those_of_the_events(train, events, workers, bound, steps):
    """D4, D5: the first to run goes on as long as it may. An oracle recounts lead, buffers and staleness from the events."""
    run = train(workers, bound, steps=steps)
    finished, updates, leads, ages = [0] * workers, [0] * workers, [], {}
    for worker, event, step in events:
        if event == "begin":
            leads.append(step - 1 - min(finished))
            ages[worker, step] = step - 1 - updates[worker]
            assert len(range(updates[worker] + 1, step + 1)) <= bound + 1  # steps whose gradients wait in buffers
        elif event == "give":
            finished[worker] = step
        elif event == "close":
            assert (steps, steps) == (step, updates[worker])  # nothing is left in a buffer
        else:
            updates[worker] += 1
            assert step == updates[worker]  # each once, in the order of the steps
            assert step <= min(finished)
    assert [steps] * workers == updates
    assert min(bound, steps - 1) == max(leads)  # up to K, and never more
    stale = sum(age > 0 for age in ages.values())
    expected = (round(sum(ages.values()) / len(ages), 4), max(ages.values()), stale, workers * steps)
    assert expected == statistics(run)
    assert 0 < stale
    assert run.sha256  # fails unless all workers hold the same parameters


def test_a_loss_falls_with_old_gradients(train):
    run = train(3, 2, steps=48, batch_size=4, learning_rate=5e-3)
    losses = run.by_step(contract.KIND_VALIDATION, "loss")
    assert losses[48] < 0.85 * losses[0]
    assert 48 * 4 * 16 == sum(run.by_step(contract.KIND_STEP, "tokens").values())  # every token once


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_stale_gradients_count_less_in_a_mean_than_fresh_ones(train, monkeypatch, damping):
    given, means = {}, {}
    give, apply = BoundedMeans._give, BoundedMeans._apply

    def watched_give(self):
        whole, tokens = self._model.grads_N.clone(), self._tokens
        give(self)
        given.setdefault(self._clock.given, []).append((whole, tokens, self._clock.staleness))

    def watched_apply(self):
        mean = apply(self)
        means.setdefault(mean.step, []).append(self._model.grads_N.clone())
        return mean

    monkeypatch.setattr(BoundedMeans, "_give", watched_give)
    monkeypatch.setattr(BoundedMeans, "_apply", watched_apply)
    train(3, 2, steps=8, damping=damping)
    assert any(len({age for _, _, age in parts}) > 1 for parts in given.values())
    for step, parts in given.items():
        weights = [1 / (1 + damping * age) for _, _, age in parts]
        total = sum(weight * tokens for weight, (_, tokens, _) in zip(weights, parts, strict=True))
        expected = sum(weight * whole for weight, (whole, _, _) in zip(weights, parts, strict=True)) / total
        for mean in means[step]:
            torch.testing.assert_close(expected, mean, rtol=1e-5, atol=1e-7)


def test_ctrl_c_ends_all_workers_after_the_same_step_with_the_same_weights(train, events, monkeypatch):
    """D4: whoever leads when the order comes; all updates up to there are made, saved, and nothing is left in a buffer."""
    order_after(monkeypatch, 5)
    run = train(3, 2, steps=9, saves=True, interval=100)
    assert {5} == {max(found) for found in steps_by_rank(run).values()}
    assert [5, 5, 5] == [step for _, event, step in events if event == "close"]
    assert run.sha256
    assert [5] == complete_checkpoints(run.run_dir, PLAN, run_id="run")


def order_after(monkeypatch, step):
    """An order to stop that every rank has heard of: the last step is this one."""

    def ordered(**given):
        order = StopOrder()
        order.decide(step)
        return RankContext(**given, stop_order=order)

    monkeypatch.setattr(simulate, "RankContext", ordered)


def steps_by_rank(run):
    found = {}
    for record in run.records(contract.KIND_STEP):
        found.setdefault(record["rank"], []).append(record["step"])
    return found


@pytest.mark.parametrize("bound", [0, 2])
def test_a_resumed_run_goes_on_with_the_weights_of_all_steps_before(train, bound):
    """With K = 0 to the bit of a run that nobody interrupted, on other numbers of workers too."""
    whole = train(3, bound, saves=True, interval=3)
    complete_checkpoints(whole.run_dir, PLAN, run_id="run")
    start = start_of(verify(whole.run_dir / contract.checkpoint_dir(3)))
    resumed = train(3, bound, interval=3, start=start)
    assert {4, 5, 6} == {record["step"] for record in resumed.records(contract.KIND_STEP)}
    assert whole.sha256 == resumed.sha256  # in this process everybody is as quick again
    if bound == 0:
        assert whole.sha256 == train(2, bound, interval=3, start=start).sha256
        assert whole.sha256 == train(0, bound, interval=3, start=start).sha256


@pytest.mark.parametrize(("workers", "precision"), [(2, "fp32"), (4, "fp32"), (3, "fp16")])
def test_a_mean_from_the_ring_is_that_of_the_tree_up_to_rounding(train, workers, precision):
    """With a validation after every step nobody leads, so both see the same weights; shards are of unequal length."""
    settings = {"validation_interval": 1, "steps": 3, "precision": precision}
    tree, ring = (train(workers, bound, **settings) for bound in (0, 2))
    for key in ("grad_norm", "loss"):
        expected, found = (run.by_step(contract.KIND_STEP, key) for run in (tree, ring))
        assert expected == pytest.approx(found, rel=2e-5 if precision == "fp32" else 1e-3)
    assert (0.0, 0, 0, 3 * workers) == statistics(ring)


def test_fp16_agrees_on_its_scale_although_gradients_are_old(train):
    run = train(3, 2, steps=8, precision="fp16")
    assert run.sha256
    assert 0 < run.by_step(contract.KIND_VALIDATION, "loss")[8] < run.by_step(contract.KIND_VALIDATION, "loss")[0]


def test_workers_of_unequal_blocks_run_the_same_number_of_steps(train):
    """Bug 22: 7 micro-batches over 3 workers, 5 over 4; nobody waits at the end for a step that another doesn't have."""
    for workers, batch in ((3, 7), (4, 5)):
        run = train(workers, 1, steps=5, batch_size=batch)
        found = [record["step"] for record in run.records(contract.KIND_STEP) if record["rank"] == workers - 1]
        assert [1, 2, 3, 4, 5] == found


def test_replicas_that_start_different_are_seen(train, monkeypatch):
    """Bug 23: means are equal everywhere, so replicas that begin with other weights never meet, and the digests say so."""
    made = []
    initialise = Model._initialise

    def differently(model):
        made.append(model)
        model.seed += len(made)
        initialise(model)

    monkeypatch.setattr(Model, "_initialise", differently)
    run = train(2, 1, steps=2)
    with pytest.raises(AssertionError, match="ranks hold different parameters"):
        assert run.sha256
