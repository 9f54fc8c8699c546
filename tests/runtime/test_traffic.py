"""TrafficCounter ÷ formula: every recipe moves exactly the bytes that it says, for workers × micro-batches × tiers (A12, D6)."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttlaunch import contract
from ttlaunch.running.readers.recorded import read_run
from ttlaunch.runtime.simulate import simulate
from ttlaunch.runtime.world import read_world
from ttlaunch.spec.recipe.images import DIGITS
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.train import build_model

from .pipelines import start_from

RECIPES = Path(__file__).parents[2] / "recipes"
TWO, THREE = ["aggregator_optimizer"], ["aggregator", "optimizer"]


@pytest.fixture(scope="module")
def books(tmp_path_factory, corpus):
    """`books(recipe, roles, …)` runs all ranks in this process and settles their books."""

    def run(recipe, roles, *, micro_batches=4, steps=3, config=None, start=None, data=None):
        folder = tmp_path_factory.mktemp("run")
        declared = import_recipe_module(RECIPES / recipe, "recipe").RECIPE
        values = config or small(micro_batches, steps)
        plan = {
            "format": contract.PLAN_FORMAT,
            "recipe": {"name": recipe, "folder": str(RECIPES / recipe)},
            "layout": "test",
            "ranks": [
                {"rank": rank, "slot": rank, "local_rank": rank, "host": "here", "role": role}
                for rank, role in enumerate(roles)
            ],
            "config": declared.config.model_validate(values).model_dump(mode="json"),
            "data": {"path": data, "sha256": None if data else corpus.sha256},
            "start": start,
        }
        (folder / contract.PLAN_FILE).write_text(json.dumps(plan))
        outcome = simulate(read_world(folder / contract.PLAN_FILE), folder, saves=True)
        assert ({}, []) == (outcome.errors, outcome.findings)
        (folder / contract.REPORT_FILE).write_text('{"status": "done"}')
        recorded = read_run(folder)
        assert sum(outcome.message_bytes.values()) == sum(edge.size for edge in recorded.traffic.edges)
        assert sum(outcome.messages.values()) == sum(edge.messages for edge in recorded.traffic.edges)
        return recorded

    return run


@pytest.fixture(scope="module")
def start_of_run(books):
    """`start_of_run(recipe, roles, config, step=…)`: what goes on from a checkpoint of a run; equal runs are run once."""
    found = {}

    def run(recipe, roles, config, *, step):
        key = json.dumps([recipe, roles, config])
        if key not in found:
            found[key] = books(recipe, roles, config=config)
        return start_from(SimpleNamespace(run_dir=found[key].path), step=step)[0]

    return run


def small(micro_batches, steps, **sections):
    training = {"steps": steps, "batch_size": micro_batches, "micro_batch_size": 1}
    validation = {"validation_interval": 2, "validation_sequences": 3}
    sizes = {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 8}
    return {"training_config": training | validation, "transformer_config": sizes} | sections


def check_exact(recorded, *, steps=3, validations=3):
    """Every edge has the bytes of the formula, to the byte, and there is no other edge."""
    traffic = recorded.traffic
    assert (None, steps, validations) == (traffic.reason, traffic.steps, traffic.validations)
    wrong = [(edge.operation, edge.source, edge.dest, edge.size, edge.expected) for edge in traffic.edges]
    assert [] == [row for row in wrong if row[3] != row[4]]
    assert traffic.edges


def moved(recorded, rank, *operations):
    """Bytes that a rank sends and receives for some operations."""
    return sum(
        edge.size
        for edge in recorded.traffic.edges
        if edge.operation in operations and rank in (edge.source, edge.dest)
    )


@pytest.mark.parametrize("server", [TWO, THREE], ids=["two tiers", "three tiers"])
@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 4), (2, 4), (2, 3), (3, 3), (3, 8), (4, 7)])
def test_tiers_move_what_they_say(books, server, workers, micro_batches):
    check_exact(books("hierarchical_parallel", ["worker"] * workers + server, micro_batches=micro_batches))


@pytest.mark.parametrize("server", [TWO, THREE], ids=["two tiers", "three tiers"])
def test_the_loss_scale_is_in_the_formula(books, server):
    config = small(4, 3)
    config["training_config"] |= {"precision": "fp16"}
    check_exact(books("hierarchical_parallel", ["worker"] * 2 + server, config=config))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("recipe", "roles", "multihost"),
    [
        ("hierarchical_parallel", ["worker"] * 3 + TWO, {}),
        ("data_parallel", ["worker"] * 3, {}),
        ("pipeline_parallel", ["stage"] * 4, {"pipeline_parallel_config": {"blocks_per_rank": [1, 1], "replicas": 2}}),
    ],
    ids=["two tiers", "data parallel", "pipeline"],
)
def test_every_precision_moves_what_it_says(books, recipe, roles, multihost, precision):
    """Whatever is computed in, gradients, weights and the residual stream travel as float32."""
    config = small(4, 3, multihost_config=multihost)
    config["training_config"] |= {"precision": precision}
    check_exact(books(recipe, roles, config=config))


@pytest.mark.parametrize("recipe", ["hierarchical_parallel", "pipeline_parallel"])
def test_the_verdict_on_going_on_is_in_the_formula(books, recipe):
    config = small(4, 3)
    config["training_config"] |= {"early_stop_patience": 9}
    if recipe == "pipeline_parallel":
        config["multihost_config"] = {"pipeline_parallel_config": {"blocks_per_rank": [1, 1]}}
    check_exact(books(recipe, ["stage"] * 2 if "multihost_config" in config else ["worker"] * 2 + THREE, config=config))


@pytest.mark.parametrize("server", [TWO, THREE], ids=["two tiers", "three tiers"])
@pytest.mark.parametrize(("workers", "local", "micro_batches"), [(2, 2, 4), (2, 2, 7), (1, 3, 4), (2, 3, 8)])
def test_workers_of_several_ranks_move_what_they_say(books, server, workers, local, micro_batches):
    """Sums of a worker's ranks meet at its first one, which alone talks to the aggregator."""
    device, multihost = {"enable_ddp": True, "mesh_shape": [1, local]}, {"num_workers": workers}
    config = small(micro_batches, 3, device_config=device, multihost_config=multihost)
    recorded = books("hierarchical_parallel", ["worker"] * workers * local + server, config=config)
    check_exact(recorded)
    aggregator = workers * local
    talking = {edge.source for edge in recorded.traffic.edges if edge.dest == aggregator and edge.source < aggregator}
    assert set(range(0, aggregator, local)) == talking


@pytest.mark.parametrize(
    ("recipe", "roles", "multihost"),
    [
        ("hierarchical_parallel", ["worker"] * 2 + THREE, {}),
        ("data_parallel", ["worker"] * 3, {}),
        ("pipeline_parallel", ["stage"] * 4, {"pipeline_parallel_config": {"blocks_per_rank": [1, 1], "replicas": 2}}),
        ("zero", ["worker"] * 2, {}),
    ],
    ids=["three tiers", "data parallel", "pipeline", "zero"],
)
def test_a_run_that_ends_early_moves_what_it_says(books, recipe, roles, multihost):
    """Only the steps and validations that there were count."""
    config = small(4, 40, multihost_config=multihost)
    config["training_config"] |= {"early_stop_patience": 1, "learning_rate": 1e-9, "early_stop_min_delta": 1.0}
    traffic = books(recipe, roles, config=config).traffic
    assert (None, (), 2) == (traffic.reason, traffic.differing, traffic.validations)
    assert traffic.steps < 40
    assert traffic.edges


@pytest.mark.parametrize(
    ("began", "steps", "validations"),
    [(6, 0, 1), (5, 1, 2), (4, 2, 2), (3, 3, 3)],
    ids=["nothing is left", "one step", "after a validation", "between validations"],
)
@pytest.mark.parametrize("stops", [{}, {"early_stop_patience": 9}], ids=["", "may stop early"])
@pytest.mark.parametrize(
    ("recipe", "roles", "multihost"),
    [
        ("hierarchical_parallel", ["worker"] * 2 + TWO, {}),
        ("hierarchical_parallel", ["worker"] * 2 + THREE, {}),
        ("data_parallel", ["worker"] * 3, {}),
        ("pipeline_parallel", ["stage"] * 2, {"pipeline_parallel_config": {"blocks_per_rank": [1, 1]}}),
        ("zero", ["worker"] * 3, {}),
    ],
    ids=["two tiers", "three tiers", "data parallel", "pipeline", "zero"],
)
def test_a_resumed_run_moves_what_it_says(
    books, start_of_run, recipe, roles, multihost, stops, began, steps, validations
):
    """Its opening validation counts, also where nothing is left to train; the sizes of buckets are told in a step."""
    config = small(4, 6, multihost_config=multihost, checkpoint_config={"interval": 1, "keep": 9})
    config["training_config"] |= stops
    start = start_of_run(recipe, roles, config, step=began)
    check_exact(books(recipe, roles, config=config, start=start), steps=steps, validations=validations)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 4), (2, 4), (3, 8)])
def test_every_zero_stage_moves_what_it_says(books, zero_stage, workers, micro_batches):
    """D1-D3, C18: gradients (n - 1)/n of S for each sum of a block, and so for each time that parameters are gathered."""
    config = small(micro_batches, 3, zero_config={"stage": zero_stage})
    config["transformer_config"] |= {"tie_embeddings": workers == 3}
    recorded = books("zero", ["worker"] * workers, config=config)
    check_exact(recorded) if workers > 1 else check_nothing(recorded)


def check_nothing(recorded):
    assert (None, ()) == (recorded.traffic.reason, recorded.traffic.edges)


def test_zero_moves_as_many_bytes_and_messages_as_a_ring(books):
    """C18: a reduce-scatter or an all-gather of a layer is n - 1 messages and (n - 1)/n of its bytes for every rank."""
    ranks, steps, layers = 4, 3, 4
    recorded = books("zero", ["worker"] * ranks, config=small(4, steps, zero_config={"stage": 3}))
    size, validations = 4 * recorded.telemetry[0].facts["values"], 3
    whole = (ranks - 1) / ranks * size
    for rank in range(ranks):
        sent = {
            name: [edge for edge in recorded.traffic.edges if (edge.operation, edge.source) == (name, rank)]
            for name in ("gradients", "weights")
        }
        messages = {name: sum(edge.messages for edge in edges) for name, edges in sent.items()}
        gathers = steps * (2 * layers - 2) + validations * layers + layers  # the last one for the digests
        assert {"gradients": steps * layers * (ranks - 1), "weights": gathers * (ranks - 1)} == messages
        assert steps * whole == pytest.approx(sum(edge.size for edge in sent["gradients"]), rel=0.05)
    assert steps * ranks * whole == sum(e.size for e in recorded.traffic.edges if e.operation == "gradients")


def test_the_six_edges_of_a_step(books):
    """A12: a worker moves 2S and one S for each further subtree, the aggregator 2(W + 1)S, the optimizer 2S."""
    recorded = books("hierarchical_parallel", ["worker"] * 3 + THREE, micro_batches=8, steps=3)
    size = 4 * recorded.telemetry[0].facts["values"]
    tensors = ("gradients", "weights")
    begun = dict.fromkeys((0, 1, 2, 4), size) | {3: 4 * size}  # the first weights
    per_step = [(moved(recorded, rank, *tensors) - begun[rank]) / 3 / size for rank in range(5)]
    further = [1, 1, 0]  # blocks of 3, 3 and 2 micro-batches of 8 are 2, 2 and 1 nodes
    assert [2 + further[0], 2 + further[1], 2, 2 * (3 + 1) + sum(further), 2] == per_step
    edges = {(edge.source, edge.dest) for edge in recorded.traffic.edges if edge.operation in tensors}
    assert {(0, 3), (1, 3), (2, 3), (3, 0), (3, 1), (3, 2), (3, 4), (4, 3)} == edges


def test_buckets_change_messages_and_not_bytes(books):
    config = small(4, 3, multihost_config={"bucket_megabytes": 0.01})
    recorded = books("hierarchical_parallel", ["worker"] * 2 + THREE, config=config)
    check_exact(recorded)
    gradients = next(edge for edge in recorded.traffic.edges if edge.operation == "gradients")
    assert 3 * 3 <= gradients.messages
    buckets = {row.bucket for row in recorded.telemetry[0].sent if row.operation == "gradients"}
    assert set(range(gradients.messages // 3)) == buckets


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 4), (2, 4), (2, 3), (3, 8), (4, 7)])
def test_data_parallel_moves_what_it_says(books, workers, micro_batches):
    recorded = books("data_parallel", ["worker"] * workers, micro_batches=micro_batches)
    if workers == 1:
        assert () == recorded.traffic.edges
    else:
        check_exact(recorded)


@pytest.mark.parametrize("kind", ["bf16", "int8", "top_k", "powersgd"])
@pytest.mark.parametrize("workers", [2, 3])
def test_compressed_gradients_move_what_they_say(books, workers, kind):
    """C17, D8: counted bytes = formula; nothing but gradients is compressed, and no weights travel."""
    recorded = books("data_parallel", ["worker"] * workers, config=small(4, 3, compression_config={"kind": kind}))
    check_exact(recorded)
    assert {"gradients", "counts", "all_gather"} == {edge.operation for edge in recorded.traffic.edges}


def test_int8_gradients_have_fewer_bytes(books):
    """C17: 3.9 times fewer than the gradient that a worker sends whole to its only peer, half up and half down."""
    sent = {
        kind: moved(
            books("data_parallel", ["worker"] * 2, config=small(4, 3, compression_config={"kind": kind})),
            0,
            "gradients",
        )
        for kind in ("none", "int8")
    }
    assert sent["none"] > 3.9 * sent["int8"]


def test_an_all_reduce_moves_the_least_there_is(books):
    """D6: 2(n - 1)/n of S out of each rank, where the blocks are nodes of the tree."""
    recorded = books("data_parallel", ["worker"] * 4, micro_batches=4)
    size = 4 * recorded.telemetry[0].facts["values"]
    sent = [
        sum(edge.size for edge in recorded.traffic.edges if (edge.operation, edge.source) == ("gradients", rank))
        for rank in range(4)
    ]
    assert [3 * 2 * 3 / 4 * size] * 4 == sent


@pytest.mark.parametrize(
    ("recipe", "roles", "multihost"),
    [
        ("data_parallel", ["worker"] * 3, {}),
        ("hierarchical_parallel", ["worker"] * 2 + ["aggregator", "optimizer"], {}),
        ("pipeline_parallel", ["stage"] * 2, {"pipeline_parallel_config": {"blocks_per_rank": [1, 1]}}),
        ("tensor_parallel", ["worker"] * 2, {}),
    ],
    ids=["data parallel", "three tiers", "pipeline", "a split model"],
)
def test_images_move_what_the_formula_says(books, recipe, roles, multihost):
    """D18: a validation goes over its images twice, for the loss and for the accuracy."""
    config = small(5, 3, multihost_config=multihost)
    config["training_config"] |= {"model_type": "conv"}
    config["transformer_config"] |= {"max_sequence_length": 64}
    check_exact(books(recipe, roles, config=config, data=DIGITS))


def stages(blocks, **pipeline):
    sizes = {"num_blocks": sum(blocks), "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 8}
    return {"multihost_config": {"pipeline_parallel_config": {"blocks_per_rank": blocks} | pipeline}, "sizes": sizes}


@pytest.mark.parametrize("keys", [{}, {"polyak_interval": 2}], ids=["", "averaged"])
@pytest.mark.parametrize(("workers", "servers", "micro_batches"), [(1, 1, 4), (2, 1, 3), (3, 2, 8), (2, 3, 4)], ids=str)
def test_synchronous_servers_move_what_they_say(books, workers, servers, micro_batches, keys):
    """D9: a worker sends S for each of its sums and gets S back, whatever the number of servers."""
    config = small(micro_batches, 3, sync_ps_config=keys | {"num_servers": servers})
    config["transformer_config"] |= {"tie_embeddings": bool(keys)}
    config["training_config"] |= {"precision": "fp16", "early_stop_patience": 9}
    check_exact(books("sync_ps", ["worker"] * workers + ["server"] * servers, config=config))


@pytest.mark.parametrize("keys", [{}, {"is_ahead": False, "pull_interval": 2}], ids=str)
@pytest.mark.parametrize("kind", ["none", "int8"])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_asynchronous_server_moves_what_its_workers_say(books, workers, kind, keys):
    """D7, D8: a header and S for each gradient, S for each pull; each of the steps was somebody's."""
    config = small(4, 7, elastic_dp_config=keys | {"slow_workers": {0: 1.5}}, compression_config={"kind": kind})
    recorded = books("elastic_dp", ["worker"] * workers + ["server"], config=config)
    traffic = recorded.traffic
    assert (None, False, ()) == (traffic.reason, traffic.is_mistaken, traffic.differing)
    assert all(edge.size == edge.expected for edge in traffic.edges)
    pushes = {edge.source: edge for edge in traffic.edges if edge.operation == "pushes"}
    assert set(range(workers)) == set(pushes)
    assert 7 == sum(edge.messages for edge in pushes.values())
    size = 4 * recorded.telemetry[0].facts["values"]
    if kind == "int8":  # a byte for each value, and four for each 256
        assert all(3.9 < size / (edge.size / edge.messages - 64) < 4 for edge in pushes.values())


@pytest.mark.parametrize("micro_batches", [4, 7])
@pytest.mark.parametrize(
    ("blocks", "pipeline"),
    [
        ([2, 1], {"schedule": "1f1b"}),
        ([1, 2, 1], {"schedule": "gpipe"}),
        ([2, 2], {"schedule": "interleaved", "chunks_per_rank": 2}),
        ([2, 2, 2], {"schedule": "interleaved", "chunks_per_rank": 2}),
        ([1, 1], {"replicas": 2}),
        ([2, 1], {"replicas": 3}),
        ([2, 2], {"schedule": "interleaved", "chunks_per_rank": 2, "replicas": 2}),
        ([1], {"replicas": 2}),
    ],
    ids=str,
)
def test_a_pipeline_moves_what_it_says(books, blocks, pipeline, micro_batches):
    config = small(micro_batches, 3, **stages(blocks, **pipeline))
    config["transformer_config"] = config.pop("sizes")
    check_exact(books("pipeline_parallel", ["stage"] * len(blocks) * pipeline.get("replicas", 1), config=config))


@pytest.mark.parametrize("pipeline", [{}, {"replicas": 2}, {"schedule": "interleaved", "chunks_per_rank": 2}], ids=str)
@pytest.mark.parametrize("blocks", [[4], [2, 2], [2, 2, 2]], ids=str)
def test_stages_that_share_a_matrix_exchange_its_gradient_once_a_step(books, blocks, pipeline):
    config = small(4, 3, **stages(blocks, **pipeline))
    config["transformer_config"] = config.pop("sizes") | {"tie_embeddings": True}
    recorded = books("pipeline_parallel", ["stage"] * len(blocks) * pipeline.get("replicas", 1), config=config)
    if len(blocks) > 1 or "replicas" in pipeline:  # else nobody sends anything
        check_exact(recorded)
    sent = [edge.size for edge in recorded.traffic.edges if edge.operation == "tied_gradient"]
    ends = 2 * pipeline.get("replicas", 1) if len(blocks) > 1 else 0
    assert [3 * 4 * 256 * 16] * ends == sent


def test_a_micro_batch_that_is_smaller_moves_less(books):
    config = small(7, 3, **stages([1, 1], replicas=2))
    config["transformer_config"] = config.pop("sizes")
    config["training_config"]["micro_batch_size"] = 2  # micro-batches of 2, 2, 2 and 1
    recorded = books("pipeline_parallel", ["stage"] * 4, config=config)
    check_exact(recorded)
    sent = [
        next(
            edge.size
            for edge in recorded.traffic.edges
            if (edge.operation, edge.source) == ("activation_gradients", rank)
        )
        for rank in (1, 3)
    ]
    assert [3 * 4 * 8 * 16 * sequences for sequences in (4, 3)] == sent


def test_a_schedule_that_is_measured_first_moves_what_it_says(books):
    config = small(4, 10, **stages([1, 1], schedule="auto"))
    config["transformer_config"] = config.pop("sizes")
    recorded = books("pipeline_parallel", ["stage"] * 2, config=config)
    assert ((), None) == (recorded.traffic.differing, recorded.traffic.reason)


def test_bytes_that_depend_on_what_is_quickest_are_not_compared(books):
    config = small(4, 3, **stages([2, 2], schedule="auto", chunks_per_rank=2))
    config["transformer_config"] = config.pop("sizes")
    traffic = books("pipeline_parallel", ["stage"] * 2, config=config).traffic
    expected = "with this configuration pipeline_parallel moves what it measures to be quickest"
    assert (expected, False, ()) == (traffic.reason, traffic.is_mistaken, traffic.differing)
    assert traffic.edges


def by_step(recorded):
    """Bytes of each step, operation, source and destination; 0 is what comes before the first step."""
    found = Counter()
    for book in recorded.telemetry:
        for row in book.sent:
            for step in range(row.first, row.last + 1, row.stride):
                found[step, row.operation, book.rank, row.dest] += row.size
    return found


def test_every_step_of_auto_with_chunks_moves_what_the_formula_of_its_schedule_says(books, make_cfg, make_context):
    """All in all `auto` is not compared, but each of its steps is that of a schedule whose run is; and blocks move."""
    ran = ["gpipe"] * 5 + ["1f1b"] * 4 + ["interleaved"] * 4  # the first of them before the first step

    def train(schedule, chunks):
        config = small(4, 16, **stages([2, 2], schedule=schedule, chunks_per_rank=chunks, replicas=2))
        config["transformer_config"] = config.pop("sizes")
        return books("pipeline_parallel", ["stage"] * 4, config=config)

    auto = train("auto", 2)
    ran += [next(rank.results["schedule"] for rank in auto.ranks if "schedule" in rank.results)] * 4
    fixed = {name: train(name, 2 if name == "interleaved" else 1) for name in ("gpipe", "1f1b", "interleaved")}
    for recorded in fixed.values():
        check_exact(recorded, steps=16, validations=9)
    of_auto, of_fixed = by_step(auto), {name: by_step(recorded) for name, recorded in fixed.items()}
    expected = {key: size for name in fixed for key, size in of_fixed[name].items() if ran[key[0]] == name}
    assert expected == {key: size for key, size in of_auto.items() if key[1] not in {"move_blocks", "end_step"}}

    sizes = {"num_blocks": 4, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 8}
    model = build_model(cfg := make_cfg(transformer=sizes), make_context(cfg))
    block = [parameter.numel() for name, parameter in model.named_parameters() if name.startswith("blocks.1.")]
    size = 4 * (3 * sum(block) + len(block))  # weights and both moments; of each tensor how many updates there were
    times = [9] if ran[-1] == "interleaved" else [9, 13]
    moved = {(step, "move_blocks", a, b): size for step in times for a, b in ((0, 1), (1, 0), (2, 3), (3, 2))}
    assert moved == {key: size for key, size in of_auto.items() if key[1] == "move_blocks"}


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_a_ring_moves_what_it_says(books, peers):
    config = {"all_reduce_config": {"megabytes": 0.004028, "repeats": 2}}
    recorded = books("fabric_minimal", ["peer"] * peers, config=config)
    assert peers == 1 or len(recorded.traffic.edges) == peers
    assert [] == [edge for edge in recorded.traffic.edges if edge.size != edge.expected]
    assert recorded.traffic.reason is None


def test_a_message_too_many_is_seen(books, monkeypatch):
    """What a wrong recipe fails: weights sent twice train to the same bits."""
    from ttlaunch.runtime.parallel.tiers.weight_receiver import WeightReceiver  # noqa: PLC0415

    begin = WeightReceiver.receive_first
    monkeypatch.setattr(WeightReceiver, "receive_first", lambda self: (begin(self), begin(self)))
    from ttlaunch.runtime.parallel.tiers.gradient_aggregator import GradientAggregator  # noqa: PLC0415

    first = GradientAggregator.send_first_weights
    monkeypatch.setattr(GradientAggregator, "send_first_weights", lambda self: (first(self), first(self)))
    recorded = books("hierarchical_parallel", ["worker"] * 2 + TWO)
    differing = [(edge.operation, edge.source, edge.dest, edge.ratio) for edge in recorded.traffic.differing]
    assert [("weights", 2, 0, 5 / 4), ("weights", 2, 1, 5 / 4)] == differing


@pytest.mark.parametrize("training", [{}, {"model_type": "mlp"}, {"activation_checkpointing": True}], ids=str)
@pytest.mark.parametrize(("ranks", "replicas", "micro_batches"), [(2, 1, 4), (2, 2, 3), (4, 1, 2)])
def test_a_split_model_moves_what_it_says(books, ranks, replicas, micro_batches, training):
    """The last micro-batch is smaller than the others."""
    config = small(2 * micro_batches - 1, 3, tensor_parallel_config={"ranks": ranks, "replicas": replicas})
    config["training_config"] |= {"micro_batch_size": 2} | training
    config["transformer_config"] |= {"num_heads": 4, "tie_embeddings": replicas > 1}
    check_exact(books("tensor_parallel", ["worker"] * ranks * replicas, config=config))


@pytest.mark.parametrize(
    "training", [{}, {"early_stop_patience": 9, "precision": "fp16"}], ids=["", "all that is agreed"]
)
@pytest.mark.parametrize("server", [TWO, THREE], ids=["two tiers", "three tiers"])
@pytest.mark.parametrize(
    ("workers", "shape", "both"), [(2, [1, 2], False), (1, [2, 2], True)], ids=["tp", "tp and ddp"]
)
def test_workers_that_split_the_model_move_what_they_say(books, server, workers, shape, both, training):
    """A7 beside A12: activations within a row, shares of gradients to the aggregator, whole ones behind it."""
    device = {"enable_tp": True, "enable_ddp": both, "mesh_shape": shape}
    config = small(3, 3, device_config=device, multihost_config={"num_workers": workers})
    config["training_config"] |= training
    check_exact(books("hierarchical_parallel", ["worker"] * workers * shape[0] * shape[1] + server, config=config))


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("blocks", "pipeline"),
    [
        ([1, 1], {}),
        ([2, 1], {"replicas": 2, "schedule": "gpipe"}),
        ([2, 2], {"schedule": "interleaved", "chunks_per_rank": 2}),
        ([2], {}),
    ],
    ids=str,
)
def test_a_pipeline_whose_stages_are_split_moves_what_it_says(books, blocks, pipeline, tied):
    config = small(3, 3, **stages(blocks, ranks_per_stage=2, **pipeline))
    config["transformer_config"] = config.pop("sizes") | {"tie_embeddings": tied}
    check_exact(books("pipeline_parallel", ["stage"] * 2 * len(blocks) * pipeline.get("replicas", 1), config=config))


def test_split_stages_that_measure_a_schedule_first_move_what_they_say(books):
    config = small(4, 10, **stages([1, 1], schedule="auto", ranks_per_stage=2))
    config["transformer_config"] = config.pop("sizes")
    recorded = books("pipeline_parallel", ["stage"] * 4, config=config)
    assert ((), None) == (recorded.traffic.differing, recorded.traffic.reason)
