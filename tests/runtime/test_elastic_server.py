"""D7, D8: an asynchronous parameter server in one process, where the order of arrivals is the same every time."""

from contextlib import nullcontext

import pytest
import torch

from tests.runtime.layouts import LAYOUTS, train
from tests.runtime.test_resume_layouts import HALF, PLAN, STEPS, config, start_of
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.runtime.parallel.servers.pushes import HEADER_BYTES, Push, pack_push, read_push
from ttlaunch.train import (
    AsyncParameterServerClient,
    RankContext,
    SnapshotValidation,
    StalenessCounts,
    TaskList,
    build_model,
    step_size,
    validation_losses,
)


@pytest.fixture
def elastic(tmp_path):
    """`elastic(workers, KEY=…, …)`: trains, and says what came out."""
    runs = []

    def run(workers, *, training=None, sections=None, saves=False, start=None, replay=(), **keys):
        name = f"{workers} workers, elastic"
        LAYOUTS.setdefault(name, ("elastic_dp", ["worker"] * workers + ["server"]))
        cfg = config(**(training or {})) | (sections or {}) | {"elastic_dp_config": keys}
        runs.append(tmp_path / f"run-{len(runs)}")
        return train(name, runs[-1], cfg, data=None, saves=saves, start=start, replay=replay)

    return run


def updates(trained):
    """The server's records, by update."""
    return [record for record in trained.records(contract.KIND_STEP) if contract.ARRIVED_FROM in record]


def arrivals(trained):
    return tuple(int(record[contract.ARRIVED_FROM]) for record in updates(trained))


def test_one_worker_that_waits_for_each_answer_equals_one_process(elastic, tmp_path, monkeypatch):
    """D7, bugs 15 and 18: every gradient is applied once, as it is, and nothing else is; first weights are the server's."""
    register = AsyncParameterServerClient.register
    monkeypatch.setattr(
        AsyncParameterServerClient, "register", lambda self: (self._model.weights_N.zero_(), register(self))
    )
    reference = train("single", tmp_path / "single", config(), data=None)
    found = elastic(1, is_ahead=False)
    assert reference.sha256 == found.sha256
    for kind, key in (("step", "loss"), ("step", "grad_norm"), ("step", "learning_rate"), ("validation", "loss")):
        assert reference.by_step(kind, key) == found.by_step(kind, key)


@pytest.mark.parametrize(("workers", "keys"), [(2, {}), (3, {"is_ahead": False}), (3, {"pull_interval": 2})], ids=str)
def test_every_steps_data_is_computed_once(elastic, workers, keys):
    """C13: whoever computes it."""
    found = elastic(workers, **keys)
    assert list(range(1, STEPS + 1)) == sorted(record["data_step"] for record in updates(found))
    assert set(range(workers)) == set(arrivals(found))
    by_worker = {(r["rank"], r["step"]): r["loss"] for r in found.records(contract.KIND_STEP) if r["rank"] < workers}
    assert {(r[contract.ARRIVED_FROM], r["data_step"]): r["loss"] for r in updates(found)} == by_worker


def true_staleness(order, *, pull_interval):
    """By update: what the server's version had become since the worker that pushed took its weights."""
    version, pushes, found = dict.fromkeys(order, 0), dict.fromkeys(order, 0), []
    for step, worker in enumerate(order, start=1):
        found.append(step - 1 - version[worker])
        pushes[worker] += 1
        if pushes[worker] % pull_interval == 0:
            version[worker] = step
    return found


@pytest.mark.parametrize("pull_interval", [1, 3])
def test_a_gradient_carries_its_true_staleness(elastic, pull_interval):
    """D7, bug 14: counted once for each gradient, by an oracle that knows the order only."""
    found = elastic(3, training={"steps": 12}, is_ahead=False, pull_interval=pull_interval)
    expected = true_staleness(arrivals(found), pull_interval=pull_interval)
    assert expected == [record["staleness"] for record in updates(found)]
    assert (round(sum(expected) / 12, 3), max(expected)) == (
        found.result("staleness average"),
        found.result("staleness maximum"),
    )
    counts = ", ".join(f"{value}: {expected.count(value)}" for value in sorted(set(expected)))
    assert counts == found.result("staleness histogram")


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_worker_that_stands_still_holds_nobody_up(elastic, monkeypatch, is_ahead):
    """D7: it comes back when the others have nothing left to do; they have done all steps but those it has in hand."""
    push, next_task = AsyncParameterServerClient.push, AsyncParameterServerClient.next_task

    def late_push(self, task, **named):
        if self._ctx.rank == 1 and self._pushes == 0:
            self._ctx.recv(torch.zeros(1), source=0, tag=99)
        push(self, task, **named)

    def last_task(self):
        task = next_task(self)
        if not task and self._ctx.rank == 0:
            self._ctx.isend(torch.zeros(1), dest=1, tag=99)
        return task

    monkeypatch.setattr(AsyncParameterServerClient, "push", late_push)
    monkeypatch.setattr(AsyncParameterServerClient, "next_task", last_task)
    found = elastic(3, training={"steps": 12}, is_ahead=is_ahead)
    in_hand = 2 if is_ahead else 1
    assert {0, 2} == set(arrivals(found)[:-in_hand])
    assert (1,) * in_hand == arrivals(found)[-in_hand:]
    assert list(range(1, 13)) == sorted(record["data_step"] for record in updates(found))


def test_a_worker_that_is_ahead_counts_its_first_micro_batch_as_older(elastic):
    """6 micro-batches, the first of which is computed with the weights of before; alone, these are one update older."""
    found = elastic(1)
    assert [0] + [pytest.approx(1 / 6)] * (STEPS - 1) == [record["staleness"] for record in updates(found)]


def test_the_rate_is_divided_by_the_staleness(elastic, tmp_path):
    whole = train("single", tmp_path / "single", config(), data=None).by_step("step", "learning_rate")
    for rule in ("inverse", "constant"):
        for record in updates(elastic(3, is_ahead=False, staleness_rule=rule)):
            divisor = max(1, record["staleness"]) if rule == "inverse" else 1
            assert whole[record["step"]] / divisor == pytest.approx(record["learning_rate"], rel=1e-12)
    assert [1.0, 1.0, 0.8, 0.25] == [step_size(staleness, "inverse") for staleness in (0, 0.5, 1.25, 4)]


@pytest.mark.parametrize(("kind", "keys"), [("none", {}), ("int8", {"is_ahead": False, "pull_interval": 2})], ids=str)
def test_a_run_is_repeated_in_the_order_of_its_arrivals(elastic, keys, kind):
    """D7: nothing but that order decides what comes out, to the bit; and it does decide."""
    sections, order = {"compression_config": {"kind": kind}}, (1, 1, 0, 1, 0, 1)
    first, other = (elastic(2, sections=sections, replay=replay, **keys) for replay in (order, ()))
    assert order == arrivals(first)
    assert order != arrivals(other)
    again = elastic(2, sections=sections, replay=arrivals(first), **keys)
    assert first.sha256 == again.sha256
    assert first.sha256 != other.sha256
    assert updates(first)[-1]["loss"] == updates(again)[-1]["loss"]


def test_a_run_that_goes_on_computes_what_was_handed_out_and_not_applied(elastic, tmp_path):
    """D23: no step's data is lost or used twice by an interruption, in whatever order gradients came."""
    order = (1, 1, 1, 0, 1, 0)
    whole = elastic(2, saves=True, replay=order)
    complete_checkpoints(whole.run_dir, PLAN, run_id="run")
    start = start_of(verify(whole.run_dir / contract.checkpoint_dir(HALF)))
    before = [record["data_step"] for record in updates(whole)][:HALF]
    assert [1, 3] == sorted(set(range(1, 5)) - set(before))[:2]
    resumed = elastic(3, saves=True, start=start)
    after = [record["data_step"] for record in updates(resumed)]
    assert list(range(1, STEPS + 1)) == sorted(before + after)
    assert list(range(HALF + 1, STEPS + 1)) == [record["step"] for record in updates(resumed)]


def test_a_server_that_stops_early_lets_all_workers_go(elastic, monkeypatch):
    """Bug 17: what workers still bring is taken and not used, so nobody hangs on either end."""
    should_stop = RankContext.should_stop
    monkeypatch.setattr(RankContext, "should_stop", lambda self: self.step >= 3 or should_stop(self))
    found = elastic(3, training={"steps": 30})
    assert [1, 2, 3] == [record["step"] for record in updates(found)]
    assert found.sha256


def test_more_workers_than_steps_leave_at_once(elastic):
    found = elastic(4, training={"steps": 2})
    assert [1, 2] == sorted(record["data_step"] for record in updates(found))


def test_a_gradient_of_weights_that_nobody_has_sent_is_a_mistake(elastic, monkeypatch, capsys):
    """D7: any version is accepted that there has been."""
    push = AsyncParameterServerClient.push

    def lies(self, task, **named):
        self._versions = [99]
        push(self, task, **named)

    monkeypatch.setattr(AsyncParameterServerClient, "push", lies)
    with pytest.raises(AssertionError):
        elastic(1)
    assert "rank 0 brings a gradient of version 99.0 in step 1" in capsys.readouterr().err


def test_int8_gradients_train_nearly_as_well(elastic):
    """D8, C17: with error feedback within 0.5 % of what whole gradients come to in the same order."""
    plain = elastic(2, training={"steps": 9})
    found = elastic(2, training={"steps": 9}, sections={"compression_config": {"kind": "int8"}}, replay=arrivals(plain))
    losses = [list(one.by_step("validation", "loss").values())[-1] for one in (plain, found)]
    assert losses[1] == pytest.approx(losses[0], rel=0.005)
    forgets = {"compression_config": {"kind": "int8", "error_feedback": False}}
    without = elastic(2, training={"steps": 9}, sections=forgets, replay=arrivals(plain))
    assert 3 == len({plain.sha256, found.sha256, without.sha256})


def test_a_validation_is_of_the_weights_that_it_began_with(make_cfg, make_context):
    """The server updates meanwhile."""
    cfg = make_cfg(training={"validation_sequences": 6})
    ctx, reported = make_context(cfg), []
    ctx.announced = lambda phase: nullcontext()
    ctx.report_validation = lambda step, losses, *, tokens: reported.append((step, losses))
    model = build_model(cfg, ctx)
    expected = validation_losses(cfg, ctx, model).tolist()
    validation = SnapshotValidation(cfg, ctx, model)
    validation.begin(3)
    assert validation.advance()
    model.weights_N.zero_()
    validation.finish()
    assert [(3, expected)] == reported


def test_a_push_says_what_it_is():
    push, payload = Push(7, 3.25, 100, 1.5, wants_weights=True), torch.arange(5, dtype=torch.uint8)
    message = pack_push(push, payload)
    assert HEADER_BYTES + 5 == len(message)
    found, rest = read_push(message)
    assert push == found
    assert torch.equal(payload, rest)


def test_tasks_are_handed_out_in_order_and_open_ones_first():
    tasks = TaskList(done=4, last=8)
    tasks.reopen([2, 4])
    assert [2, 4, 7, 8, 0] == [tasks.hand_out() for _ in range(5)]
    tasks.close(7)
    assert [2, 4, 8] == tasks.open_steps()


def test_staleness_is_counted_by_gradient():
    counts = StalenessCounts()
    assert (0.0, 0, "") == (counts.average, counts.maximum, counts.histogram())
    for staleness in (0, 1.25, 1, 4):
        counts.add(staleness)
    assert (1.5625, 4, "0: 1, 1: 2, 4: 1") == (counts.average, counts.maximum, counts.histogram())
