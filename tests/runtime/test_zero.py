"""ZeRO over our collectives: the bits of one process at every stage, and what a rank keeps of the model (C7, C8, D1-D3)."""

import gc
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from ttlaunch import contract
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.zero.weights import GatheredWeights, StaleShardError
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.world import Rank
from ttlaunch.train import (
    LayerPasses,
    OwnedParameters,
    ScatteredGradients,
    ShardLayout,
    SharedNorms,
    build_model,
    build_optimizer,
)

from .layouts import train, train_recipe

STAGES = [0, 1, 2, 3]


def config(zero_stage=3, *, tied=False, **training):
    small = {"steps": 3, "batch_size": 5, "micro_batch_size": 1, "validation_sequences": 3, "validation_interval": 2}
    sizes = {"num_blocks": 3, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16, "dropout_prob": 0.1}
    return {
        "training_config": small | {"clip_grad_norm_max_norm": 0.1} | training,
        "transformer_config": sizes | {"tie_embeddings": tied},
        "zero_config": {"stage": zero_stage},
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, by what it trains with."""
    found = {}

    def run(**training):
        key = str(training)
        if key not in found:
            values = config(**training)
            del values["zero_config"]
            found[key] = train("single", tmp_path_factory.mktemp("single") / "run", values, data=None)
        return found[key]

    return run


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("zero_stage", STAGES)
def test_every_stage_trains_to_the_bits_of_one_process(tmp_path, reference, zero_stage, workers):
    """C7, C8, D1, D2, D3: 5 micro-batches divide by no world size; parameters, losses and norms are equal."""
    expected = reference()
    found = train_recipe("zero", ["worker"] * workers, tmp_path / "run", config(zero_stage), data=None)
    assert expected.sha256 == found.sha256
    for kind, keys in ((contract.KIND_STEP, ("loss", "tokens", "grad_norm")), (contract.KIND_VALIDATION, ("loss",))):
        for key in keys:
            assert expected.by_step(kind, key) == found.by_step(kind, key)


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize(("workers", "training"), [(2, {}), (3, {"model_type": "mlp"})], ids=str)
def test_a_matrix_that_two_layers_share_has_one_owner(tmp_path, reference, zero_stage, workers, training):
    """C8, D2: the gradients of both uses meet where its rows are owned, at every stage; norms count it once."""
    expected = reference(tied=True, **training)
    values = config(zero_stage, tied=True, **training)
    found = train_recipe("zero", ["worker"] * workers, tmp_path / "run", values, data=None)
    assert expected.sha256 == found.sha256
    for key in ("loss", "grad_norm"):
        assert expected.by_step(contract.KIND_STEP, key) == found.by_step(contract.KIND_STEP, key)


@pytest.mark.parametrize(
    "training",
    [
        {"precision": "bf16"},
        {"precision": "fp16", "tied": True},
        {"optimizer": "sgd", "learning_rate": 0.05},
        {"model_type": "mlp"},
        {"activation_checkpointing": True},
        {"gradient_accumulation_steps": 2, "batch_size": 4, "use_clip_grad_norm": False},
    ],
    ids=str,
)
def test_whatever_is_configured_the_bits_are_those_of_one_process(tmp_path, reference, training):
    """C8, D2."""
    found = train_recipe("zero", ["worker"] * 3, tmp_path / "run", config(3, **training), data=None)
    assert reference(**training).sha256 == found.sha256


def test_messages_of_a_layer_travel_while_others_compute(tmp_path, monkeypatch):
    """C8: at stage 3 a layer is being gathered before the one before it computes; gradients leave with their layer."""
    found = []

    def watch(kind, name, event, layer_of):
        method = getattr(kind, name)

        def watched(self, *given, **named):
            found.append((event, layer_of(self, *given)))
            return method(self, *given, **named)

        monkeypatch.setattr(kind, name, watched)

    watch(GatheredWeights, "_gather", "gather", lambda _, layer: layer.index)
    watch(LayerPasses, "forward", "forward", lambda _, layer: layer)
    watch(LayerPasses, "backward", "backward", lambda _, layer, at: layer)
    watch(ScatteredGradients, "reduce", "reduce", lambda _, layer, counts: layer.index)
    watch(ScatteredGradients, "_finish", "finish", lambda _, under_way: under_way.layer.index)
    train_recipe("zero", ["worker"], tmp_path / "run", config(3, steps=1, validation_interval=9), data=None)
    begin = found.index(("forward", 0))
    step = [event for event, _ in itertools.groupby(found[begin - 2 : found.index(("finish", 0)) + 1])]
    last = 4  # embedding, three blocks, head
    forward = [event for layer in range(last) for event in [("gather", layer + 1), ("forward", layer)]]
    assert [("gather", 0), *forward] == step[: 2 * last + 1]
    rest = step[2 * last + 1 :]
    for layer in range(last, 0, -1):
        assert rest.index(("backward", layer)) < rest.index(("reduce", layer)) < rest.index(("backward", layer - 1))
        assert rest.index(("backward", layer - 1)) < rest.index(("finish", layer))  # not waited for before
    gathered = [layer for event, layer in rest if event == "gather"]
    assert list(range(last - 2, -1, -1)) == gathered
    for layer in gathered:
        assert rest.index(("gather", layer)) < rest.index(("backward", layer + 1))


def test_layers_are_reported_alike(tmp_path, reference):
    training = {"log_layer_grad_norms": True}
    found = train_recipe("zero", ["worker"] * 2, tmp_path / "run", config(2, **training), data=None)
    records = [run.records(contract.KIND_LAYER_NORMS) for run in (reference(**training), found)]
    expected, own = ([(one["step"], one["norms"]) for one in of] for of in records)
    assert expected == own
    assert expected


def test_a_rank_without_a_part_of_the_validation_gathers_layers_all_the_same(tmp_path, reference):
    """C13: 2 micro-batches of a validation for 4 ranks; whoever has none must not leave the others waiting."""
    training = {"validation_sequences": 2}
    found = train_recipe("zero", ["worker"] * 4, tmp_path / "run", config(3, **training), data=None)
    expected = reference(**training).by_step(contract.KIND_VALIDATION, "loss")
    assert expected == found.by_step(contract.KIND_VALIDATION, "loss")


BYTES = {0: lambda n: 16, 1: lambda n: 8 + 8 / n, 2: lambda n: 4 + 12 / n, 3: lambda n: 16 / n}
"""Of a parameter with AdamW in float32, on each of n ranks."""


@pytest.mark.parametrize("zero_stage", STAGES)
def test_a_rank_keeps_no_more_than_its_stage_says(make_cfg, make_context, zero_stage):
    """C8, D1, D3: all memory of tensors that are alive, whoever holds them, within 1 % of the formula."""
    cfg = make_cfg(transformer={"num_blocks": 3, "num_heads": 2, "embedding_dim": 64, "max_sequence_length": 32})
    ctx = make_context(cfg)
    gc.collect()
    gc.freeze()  # what other tests and modules hold is looked at no more: a process of many tests has millions of objects
    before = held_bytes()
    for workers in (2, 3, 4):
        model = build_model(cfg, ctx)
        layout = ShardLayout(dict(model.named_parameters()), ranks=workers)
        owned = OwnedParameters(model, layout, place=workers - 1, zero_stage=zero_stage)
        optimizer = build_optimizer(cfg, owned, total_steps=10)
        count = sum(math.prod(shape) for shape in layout.shapes.values())
        assert BYTES[zero_stage](workers) == pytest.approx((held_bytes() - before) / count, rel=0.01)
        del model, layout, owned, optimizer


def held_bytes():
    """Memory of the tensors that were made since `gc.freeze`."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    storages = [one.untyped_storage() for one in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("zero_stage", STAGES)
def test_every_rank_reports_what_it_keeps_after_training(tmp_path, zero_stage):
    """D3: the same, measured in a run, where gradients were added and layers gathered."""
    values = config(zero_stage, steps=2)
    values["transformer_config"]["embedding_dim"] = 64
    found = train_recipe("zero", ["worker"] * 3, tmp_path / "run", values, data=None)
    for rank in range(3):
        assert BYTES[zero_stage](3) == pytest.approx(found.result(f"bytes a parameter, rank {rank}"), rel=0.01)


def test_no_rank_owns_more_than_a_row_above_its_share():
    """C7: shards begin between rows and at a leaf of the norm's tree; layers make up for one another."""
    shapes = [("embedding.token.weight", (50, 24)), ("embedding.position.weight", (8, 24))]
    shapes += [
        (f"blocks.{block}.{name}", shape) for block in range(5) for name, shape in (("a", (24, 24)), ("b", (7,)))
    ]
    shapes += [("head.norm.weight", (24,)), ("head.output.weight", (50, 24))]
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes}
    flat = FlatParameters(parameters.values())
    for ranks in range(1, 8):
        layout = ShardLayout(parameters, ranks=ranks)
        owned = [sum(len(layer.shards[rank]) for layer in layout.layers) for rank in range(ranks)]
        assert len(flat.weights_N) == sum(owned)
        assert max(owned) - min(owned) <= 2 * 48  # lcm(24, 16), at each end
        for layer in layout.layers:
            fragments = [one for shard in layer.shards for one in layout.fragments(shard)]
            found = {name: [one.rows for one in fragments if one.name == name] for name in parameters}
            for name in list(parameters)[layer.parameters.start : layer.parameters.stop]:
                assert list(range(len(parameters[name]))) == [row for rows in found[name] for row in rows]


@pytest.fixture
def alone(make_cfg, make_context):
    """The weights of a world of one rank, at stage 3, and a pass over a layer."""
    cfg = make_cfg()
    model = build_model(cfg, make_context(cfg))
    layout = ShardLayout(dict(model.named_parameters()), ranks=1)
    owned = OwnedParameters(model, layout, place=0, zero_stage=3)
    weights = GatheredWeights(model, owned, ctx=LonelySocket(), among=[Rank(0)])
    return weights, lambda layer: model(torch.zeros(1, 4, dtype=torch.int64), layer=layer)


@pytest.mark.parametrize("name", ["traffic", "ledger"])
def test_norms_are_counted_under_the_former_name_of_the_counter_too(make_cfg, make_context, name):
    cfg = make_cfg()
    model = build_model(cfg, make_context(cfg))
    owned = OwnedParameters(model, ShardLayout(dict(model.named_parameters()), ranks=1), place=0, zero_stage=3)
    counter = TrafficCounter()
    SharedNorms(owned, ctx=LonelySocket(), among=[Rank(0)], **{name: counter})
    assert 0 < counter._facts["norm_nodes"]


class LonelySocket:
    rank = Rank(0)


def test_a_layer_that_was_not_fetched_cannot_be_read(alone):
    """C8: a stale read is impossible."""
    weights, run = alone
    weights.publish(0)
    weights.begin(0)
    with pytest.raises(StaleShardError, match="rank 0 holds nothing of layer 0, this step reads version 0"):
        run(0)
    weights.fetch(0, then=1)
    run(0)
    weights.fetch(1, then=2)  # takes the memory of layer 0
    with pytest.raises(StaleShardError, match="rank 0 holds nothing of layer 0, this step reads version 0"):
        run(0)


def test_parameters_of_the_step_before_cannot_be_read(alone):
    """C8: neither those that the owner has not updated yet, nor those that were gathered before it did."""
    weights, run = alone
    weights.publish(0)
    weights.begin(0)
    weights.fetch(0, then=None)
    run(0)
    expected = "rank 0 has published version 0 of its shard of layer 0, this step reads version 1"
    weights.begin(1)
    with pytest.raises(StaleShardError, match=expected):
        weights.fetch(0, then=None)
    with pytest.raises(StaleShardError, match="rank 0 holds nothing of layer 0, this step reads version 1"):
        run(0)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_an_owner_that_is_a_step_behind_is_named(make_cfg, make_context, zero_stage):
    """C8: the version travels; two ranks, of which one publishes that of the step before."""
    cfg = make_cfg()
    world = InProcessWorld(["worker"] * 2)

    def live(rank):
        model = build_model(cfg, make_context(cfg))
        layout = ShardLayout(dict(model.named_parameters()), ranks=2)
        owned = OwnedParameters(model, layout, place=rank, zero_stage=zero_stage)
        weights = GatheredWeights(model, owned, ctx=world.communicator(rank), among=[Rank(0), Rank(1)])
        weights.publish(5 - rank)
        weights.begin(5)
        weights.fetch(0, then=1)

    outcome = world.run({Rank(rank): partial(live, Rank(rank)) for rank in range(2)})
    (error,) = outcome.errors.values()
    assert isinstance(error, StaleShardError)
    assert str(error) == "rank 1 has published version 4 of its shard of layer 0, this step reads version 5"
