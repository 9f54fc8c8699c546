"""D9, D8: synchronous parameter servers: fresh gradients only, late workers, averaged weights; all in one process."""

import json
import math

import pytest
import torch

from tests.runtime.layouts import LAYOUTS, RECIPES, train
from tests.runtime.test_resume_layouts import config
from ttlaunch import contract
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.parallel.servers import parameter_server
from ttlaunch.runtime.parallel.servers.messages import check_counts
from ttlaunch.runtime.parallel.servers.shard import cut_layers, cut_values
from ttlaunch.runtime.simulate import simulate
from ttlaunch.runtime.world import World
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.train import (
    ParameterServerClient,
    PolyakAverage,
    build_model,
    build_optimizer,
    differentiate,
    global_norm,
    micro_batches,
)

LATE, FROM, UNTIL = 1, 2, 4
"""A worker whose gradient of one step comes when the others are in another."""


def ps(workers, servers, **sections):
    name = f"{workers} workers, {servers} servers"
    LAYOUTS.setdefault(name, ("sync_ps", ["worker"] * workers + ["server"] * servers))
    return name, config() | sections


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return train("single", tmp_path_factory.mktemp("single") / "run", config(), data=None)


@pytest.mark.parametrize(("workers", "servers"), [(1, 3), (2, 1), (3, 2), (4, 3)])
def test_any_workers_and_servers_equal_one_process(reference, tmp_path, monkeypatch, workers, servers):
    """D9: a step is made of the gradients of all, added in one order; each server has its layers, and the first weights."""
    receive = ParameterServerClient.receive_first_weights
    monkeypatch.setattr(
        ParameterServerClient, "receive_first_weights", lambda self: (self._model.weights_N.zero_(), receive(self))
    )
    monkeypatch.setattr(parameter_server, "_MOST_AT_ONCE", 2)  # so that it does not wait for all of them at a time
    found = train(*layout_and(tmp_path, *ps(workers, servers)), data=None)
    assert reference.sha256 == found.sha256
    for kind, key in (("step", "loss"), ("step", "grad_norm"), ("validation", "loss")):
        assert reference.by_step(kind, key) == found.by_step(kind, key)


def layout_and(tmp_path, name, cfg):
    return name, tmp_path / "run", cfg


def test_a_scaled_loss_equals_one_process(tmp_path):
    """E12: servers agree on the overflow skip by the norm that they share, and tell workers the scale."""
    name, cfg = ps(2, 2)
    cfg = cfg | {"loss_scale_config": {"initial_power": 40, "max_power": 40}}
    cfg["training_config"] = cfg["training_config"] | {"precision": "fp16"}
    expected = train("single", tmp_path / "single", cfg, data=None)
    found = train(name, tmp_path / "run", cfg, data=None)
    assert expected.sha256 == found.sha256
    assert expected.result("skipped steps") == found.result("skipped steps")
    assert found.result("skipped steps")


@pytest.mark.parametrize("servers", [1, 3])
def test_tied_embeddings_are_updated_by_one_server(tmp_path, servers):
    name, cfg = ps(2, servers)
    cfg["transformer_config"] = cfg["transformer_config"] | {"tie_embeddings": True}
    found = train(name, tmp_path / "run", cfg, data=None)
    assert train("single", tmp_path / "single", cfg, data=None).sha256 == found.sha256


def test_training_that_ends_early_ends_everywhere(tmp_path):
    name, cfg = ps(2, 2)
    stops = {"steps": 40, "validation_interval": 2, "early_stop_patience": 1, "early_stop_min_delta": 9.0}
    cfg["training_config"] = cfg["training_config"] | stops
    found = train(name, tmp_path / "run", cfg, data=None)
    assert train("single", tmp_path / "single", cfg, data=None).sha256 == found.sha256
    assert [1, 2] == list(found.by_step("step", "loss"))


@pytest.fixture
def one_is_late(monkeypatch):
    """One worker pushes its gradient of step `FROM` only when another has pushed its of step `UNTIL`."""
    push = ParameterServerClient.push

    def late_push(self, step, sums):
        word = torch.zeros(1)
        if (self._ctx.rank, step) == (LATE, FROM):
            self._ctx.recv(word, source=0, tag=99)
        push(self, step, sums)
        if (self._ctx.rank, step) == (0, UNTIL):
            self._ctx.isend(word, dest=LATE, tag=99).wait()

    monkeypatch.setattr(ParameterServerClient, "push", late_push)


@pytest.mark.parametrize("servers", [2])
def test_a_late_gradient_is_refused_and_counted_and_its_worker_goes_on(one_is_late, tmp_path, make_context, servers):
    """D9, bugs 15, 16 and 19: steps 2 and 3 are made without it, weighted by the tokens that came; then it takes part again."""
    name, cfg = ps(3, servers, sync_ps_config={"straggler": "drop", "straggler_timeout_s": 5.0, "num_servers": servers})
    found = train(name, tmp_path / "run", cfg, data=None)
    assert 1 == found.result("refused gradients")
    first = [record for record in found.records(contract.KIND_STEP) if record["rank"] == 3]
    whole = 6 * 16
    expected = [whole, whole * 4 // 6, whole * 4 // 6, whole, whole, whole]
    assert expected == [record["tokens"] for record in first]
    of_late = [record["step"] for record in found.records(contract.KIND_STEP) if record["rank"] == LATE]
    assert [1, 4, 5, 6] == of_late
    by_worker = {(record["rank"], record["step"]): record for record in found.records(contract.KIND_STEP)}
    step_2 = [by_worker[rank, FROM] for rank in (0, 2)]
    mean = sum(record["loss"] * record["tokens"] for record in step_2) / sum(record["tokens"] for record in step_2)
    assert math.isclose(mean, first[1]["loss"], rel_tol=1e-12)
    resolved = import_recipe_module(RECIPES / "sync_ps", "recipe").RECIPE.config.model_validate(cfg)
    assert first[1]["grad_norm"] == pytest.approx(norm_without(range(2, 4), resolved, make_context(resolved)), rel=1e-5)
    (note,) = [record["text"] for record in found.records(contract.KIND_NOTE)]  # steps 2 and 3 are one lateness
    late = "no gradient of step 2 from rank 1 (worker) within 5 s of the last one that came"
    assert f"{late}; steps are made without it until it comes" == note
    assert found.sha256  # the late one ends with the servers' weights, too


def norm_without(missing, cfg, ctx):
    """Of the gradient of step 2 where these micro-batches are missing: the mean over the others' tokens."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=cfg.training_config.steps)
    for step, left_out in ((1, ()), (FROM, missing)):
        model.zero_grad()
        tokens = 0
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
            if index not in left_out:
                tokens += differentiate(model, x_BT, y_BT, masks=model.masks(step, index))[1]
        model.take_gradients().div_(tokens)
        norm = global_norm(optimizer.squared_norms())
        optimizer.step(step, norm=norm)
    return norm


def test_a_worker_that_is_late_at_the_end_is_waited_for(monkeypatch, tmp_path):
    """Bug 17: servers end when the workers do, and not before."""
    push = ParameterServerClient.push

    def late_push(self, step, sums):
        if (self._ctx.rank, step) == (LATE, 5):
            self._ctx.recv(torch.zeros(1), source=0, tag=99)
        push(self, step, sums)

    def last_word(self, named):
        if self.rank == 0:
            self.isend(torch.zeros(1), dest=LATE, tag=99).wait()
        report(self, named)

    from ttlaunch.train import RankContext  # noqa: PLC0415

    report = RankContext.report_parameters
    monkeypatch.setattr(ParameterServerClient, "push", late_push)
    monkeypatch.setattr(RankContext, "report_parameters", last_word)
    name, cfg = ps(3, 2, sync_ps_config={"straggler": "drop", "num_servers": 2})
    found = train(name, tmp_path / "run", cfg, data=None)
    assert 1 == found.result("refused gradients")
    assert found.sha256


def test_a_late_worker_ends_the_run_where_that_is_the_policy(one_is_late, tmp_path, monkeypatch):
    name, cfg = ps(3, 2, sync_ps_config={"straggler": "fail", "straggler_timeout_s": 5.0, "num_servers": 2})
    outcome = play(name, tmp_path / "run", cfg)
    assert [3] == list(outcome.errors)
    expected = "no gradient of step 2 from rank 1 (worker) within 5 s of the last one that came"
    assert expected == str(outcome.errors[3])


def play(layout, run_dir, cfg):
    """What a world comes to that is meant to fail."""
    recipe, roles = LAYOUTS[layout]
    run_dir.mkdir()
    resolved = import_recipe_module(RECIPES / recipe, "recipe").RECIPE.config.model_validate(cfg)
    ranks = tuple(range(len(roles)))
    world = World(
        recipe_folder=RECIPES / recipe,
        layout=layout,
        roles=tuple(roles),
        hosts=("here",) * len(roles),
        local_ranks=ranks,
        config=resolved.model_dump(mode="json"),
        data_path=None,
        data_sha256=None,
    )
    return simulate(world, run_dir, saves=False)


def test_a_gradient_of_a_step_to_come_or_of_other_micro_batches_is_a_mistake():
    rows = torch.tensor([[3.0, 4, 2, 10, 1.5]])
    assert 3 == check_counts(rows, [range(4, 6)], worker=1, newest=3)
    with pytest.raises(CommunicationError, match="rank 1 brings a gradient of step 3, but step 2 is not done"):
        check_counts(rows, [range(4, 6)], worker=1, newest=2)
    with pytest.raises(
        CommunicationError, match=r"rank 1 brings the sums over \[range\(4, 6\)\], expected \[range\(0, 4\)\]"
    ):
        check_counts(rows, [range(4)], worker=1, newest=3)


class Weights:
    """Three parameters in one vector, as a model has them."""

    def __init__(self):
        self.weights_N = torch.randn(10, generator=torch.Generator().manual_seed(0))

    def named_parameters(self):
        return [("a", self.weights_N[:4]), ("b", self.weights_N[4:10].view(2, 3))]


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("decay", [None, 0.0, 0.9])
def test_an_average_equals_its_closed_form(interval, decay):
    """D9, bug 18: the weight of the newest is 1 / k, or 1 - decay, and never collapses to 0."""
    model, seen = Weights(), []
    average = PolyakAverage(model, interval=interval, decay=decay)
    for step in range(1, 31):
        model.weights_N.add_(torch.randn(10, generator=torch.Generator().manual_seed(step)))
        average.update(step)
        seen += [model.weights_N.double()] if step % interval == 0 else []
    k = len(seen)
    assert 30 // interval == k
    if decay is None:
        expected = sum(seen) / k
    else:
        shares = [decay ** (k - 1)] + [(1 - decay) * decay ** (k - i) for i in range(2, k + 1)]
        assert math.isclose(1.0, sum(shares), rel_tol=1e-12)
        expected = sum(share * weights for share, weights in zip(shares, seen, strict=True))
    torch.testing.assert_close(expected.float(), average.average_N, rtol=1e-5, atol=1e-6)
    named = dict(average.named_average())
    assert torch.equal(average.average_N[4:].view(2, 3), named["b"])
    before = model.weights_N.clone()
    with average.in_place():
        assert torch.equal(average.average_N, model.weights_N)
    assert torch.equal(before, model.weights_N)


@pytest.mark.parametrize("servers", [2])
def test_the_average_is_validated_and_kept_and_gone_on_from(tmp_path, servers):
    """D9: the average after a resume, in any layout, is that of the run that nobody interrupted."""
    from safetensors import safe_open  # noqa: PLC0415

    from tests.runtime.test_resume_layouts import HALF, PLAN, start_of  # noqa: PLC0415
    from ttlaunch.running.checkpoints.complete import complete_checkpoints  # noqa: PLC0415
    from ttlaunch.running.checkpoints.resume import verify  # noqa: PLC0415

    LAYOUTS.setdefault("ps alone", ("sync_ps", ["trainer"]))
    name, cfg = ps(2, servers, sync_ps_config={"polyak_interval": 1, "polyak_decay": 0.5, "num_servers": servers})
    whole = train("ps alone", tmp_path / "whole", cfg, data=None, saves=True)
    complete_checkpoints(whole.run_dir, PLAN, run_id="run")
    start = start_of(verify(whole.run_dir / contract.checkpoint_dir(HALF)))
    resumed = train(name, tmp_path / "resumed", cfg, data=None, saves=True, start=start)
    key = "validation loss of averaged weights"
    assert whole.result(key) == resumed.result(key)
    assert resumed.result(key) != list(resumed.by_step("validation", "loss").values())[-1]

    def averages(trained):
        found = {}
        for path in sorted((trained.run_dir / "checkpoints").glob("step-6*/*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                found |= {n: file.get_tensor(n) for n in names if n.startswith("optimizer.polyak.")}
        return found

    one, other = averages(whole), averages(resumed)
    assert one.keys() == other.keys()
    assert len(one) == len(next(iter(whole.records(contract.KIND_PARAMETERS)))["digests"])
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_layers_are_cut_evenly_and_all_are_there(make_cfg, make_context):
    cfg = make_cfg(transformer={"num_blocks": 6})
    model = build_model(cfg, make_context(cfg))
    count = len(list(model.named_parameters()))
    for parts in range(1, 9):
        cut = cut_layers(model, parts=parts)
        assert list(range(count)) == [at for part in cut for at in part]
        assert parts == len([part for part in cut if part])
        values = cut_values(model, parts=parts)
        assert (0, model.weights_N.numel()) == (values[0].start, values[-1].stop)
    with pytest.raises(ValueError, match="8 layers cannot be cut into 9 parts"):
        cut_layers(model, parts=9)


@pytest.mark.parametrize("kind", ["int8", "powersgd"])
def test_compressed_gradients_train_nearly_as_well(reference, tmp_path, kind):
    """D8: with error feedback, from each worker to each server."""
    name, cfg = ps(2, 2, compression_config={"kind": kind, "k": 0.1})
    found = train(name, tmp_path / "run", cfg, data=None)
    losses = [list(one.by_step("validation", "loss").values())[-1] for one in (reference, found)]
    assert losses[1] < 1.05 * losses[0]
    cfg["compression_config"] |= {"error_feedback": False}
    without = train(name, tmp_path / "without", cfg, data=None)
    assert 3 == len({reference.sha256, found.sha256, without.sha256})


def test_one_server_is_only_what_its_layers_need(tmp_path):
    """A8: the optimizer's state of a layer is on one server."""
    name, cfg = ps(2, 3)
    found = train(name, tmp_path / "run", cfg, data=None, saves=True)
    shards = sorted((found.run_dir / "checkpoints").glob("step-6*/rank-*.json"))
    names = [set(json.loads(path.read_text())["tensors"]) for path in shards]
    assert 3 == len(names)
    assert not names[0] & names[1] | names[0] & names[2] | names[1] & names[2]
