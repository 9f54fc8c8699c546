"""The recipes with real ranks under mpirun: every layout against one process, bit for bit."""

import itertools
import json
from pathlib import Path

import pytest

from tests.recipes.peers import write_peers
from ttlaunch import contract

pytestmark = pytest.mark.mpi

STEPS = 30


def small(steps=STEPS, *, blocks_per_rank=None, pipeline=None, **training):
    config = {
        "training_config": {"steps": steps, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 20}
        | {"gradient_accumulation_steps": 2, "validation_sequences": 5, "learning_rate": 5e-3}
        | training,
        "transformer_config": {"num_blocks": 4, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
        | {"dropout_prob": 0.1},
        "scheduler_config": {"type": "cosine", "warmup_steps": 5},
    }
    if blocks_per_rank:
        config["multihost_config"] = {
            "pipeline_parallel_config": {"blocks_per_rank": blocks_per_rank} | (pipeline or {})
        }
    return config


@pytest.fixture(scope="module")
def reference(run_ranks):
    """One process, by model type; and what a pipeline's own single layout gives."""
    found = {}

    def run(recipe="hierarchical_parallel", **training):
        key = json.dumps([recipe, training])
        if key not in found:
            found[key] = run_ranks(recipe, ["trainer"], small(**training))
            assert found[key].process.returncode == 0, found[key].output
        return found[key]

    return run


def check_equal(expected, found):
    """The same parameters, losses, norms and validations, bit for bit."""
    assert found.process.returncode == 0, found.output
    assert expected.sha256 == found.sha256
    for kind, keys in (("step", ("loss", "tokens", "grad_norm", "learning_rate")), ("validation", ("loss", "tokens"))):
        for key in keys:
            assert expected.by_step(kind, key) == found.by_step(kind, key)
    assert [0, 20, STEPS] == list(found.by_step("validation", "loss"))
    assert STEPS == len(found.by_step("step", "loss"))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("server", [["aggregator_optimizer"], ["aggregator", "optimizer"]])
@pytest.mark.core
def test_tiers_equal_one_process(run_ranks, reference, server, workers):
    """A2, A5, A9: 12 micro-batches of unequal blocks' subtrees, with clipping, dropout and accumulation."""
    found = run_ranks("hierarchical_parallel", ["worker"] * workers + server, small())
    check_equal(reference(), found)
    assert reference().by_step("validation", "loss")[STEPS] < 0.8 * reference().by_step("validation", "loss")[0]


def test_a_worker_of_two_ranks_equals_two_workers(run_ranks, reference):
    """A6: 4 ranks of 2 workers, with blocks of 3 micro-batches, and buckets smaller than most parameters."""
    config = small() | {"device_config": {"enable_ddp": True, "mesh_shape": [1, 2]}}
    config["multihost_config"] = {"num_workers": 2, "bucket_megabytes": 0.004}
    found = run_ranks("hierarchical_parallel", ["worker"] * 4 + ["aggregator", "optimizer"], config)
    check_equal(reference(), found)


def test_parameter_servers_equal_one_process(run_ranks, reference):
    """D9: 3 workers of 12 micro-batches, 2 servers, an average beside the weights."""
    config = small() | {"sync_ps_config": {"num_servers": 2, "polyak_interval": 5}}
    check_equal(reference(), run_ranks("sync_ps", ["worker"] * 3 + ["server"] * 2, config))


def test_a_slow_worker_is_waited_for_so_long_and_then_dropped_and_counted(run_ranks):
    """D9: in real time; a step that is made of less than all tokens ends no sooner than the timeout after the one before."""
    keys = {"straggler": "drop", "straggler_timeout_s": 0.05, "slow_workers": {1: 20}}
    found = run_ranks("sync_ps", ["worker"] * 2 + ["server"], small(6) | {"sync_ps_config": keys}, timeout_s=60)
    assert found.process.returncode == 0, found.output
    assert found.sha256
    steps = [record for record in found.records(2, "step") if "tokens" in record]
    assert list(range(1, 7)) == [record["step"] for record in steps]
    whole = 12 * 16
    waits = [b["time"] - a["time"] for a, b in itertools.pairwise(steps) if b["tokens"] < whole]
    assert waits
    assert min(waits) > 0.05
    (refused,) = [
        r["values"]["refused gradients"] for r in found.records(2, "result") if "refused gradients" in r["values"]
    ]
    assert 1 <= refused <= len(waits) + 1


def test_small_buckets_equal_one_process(run_ranks, reference):
    """A13: many messages a step, and no norm that all updates wait for, as they do for workers of two ranks above."""
    config = small(use_clip_grad_norm=False) | {"multihost_config": {"num_workers": 3, "bucket_megabytes": 0.001}}
    found = run_ranks("hierarchical_parallel", ["worker"] * 3 + ["aggregator", "optimizer"], config)
    check_equal(reference(use_clip_grad_norm=False), found)


@pytest.mark.parametrize("blocks", [[3, 1], [1, 1, 1, 1]])
def test_a_pipeline_equals_one_process(run_ranks, reference, blocks):
    """B10, D10: the requirement is 1e-6; the order of sums is the same, so the bits are."""
    found = run_ranks("pipeline_parallel", ["stage"] * len(blocks), small(blocks_per_rank=blocks))
    check_equal(reference("pipeline_parallel"), found)
    check_equal(reference(), found)


@pytest.mark.parametrize(
    ("ranks", "pipeline"),
    [(2, {"schedule": "auto", "chunks_per_rank": 2}), (4, {"schedule": "gpipe", "replicas": 2})],
)
def test_other_schedules_and_replicas_equal_one_process(run_ranks, reference, ranks, pipeline):
    """B10: `auto` runs three schedules and moves blocks; replicas average their gradients."""
    found = run_ranks("pipeline_parallel", ["stage"] * ranks, small(blocks_per_rank=[2, 2], pipeline=pipeline))
    check_equal(reference("pipeline_parallel"), found)


def test_split_models_equal_one_process_up_to_rounding(run_ranks, reference):
    """E15, A7: with real ranks."""
    found = run_ranks("tensor_parallel", ["worker"] * 2, small(10) | {"tensor_parallel_config": {"ranks": 2}})
    assert found.process.returncode == 0, found.output
    assert found.sha256
    for kind in ("step", "validation"):
        expected = reference(steps=10).by_step(kind, "loss")
        told = {record["step"]: record["loss"] for record in found.records(0, kind)}
        assert expected == pytest.approx(told, rel=1e-5)
        assert expected


def test_the_feed_forward_model_runs_under_both(run_ranks, reference):
    tiers = run_ranks("hierarchical_parallel", ["worker", "worker", "aggregator_optimizer"], small(model_type="mlp"))
    check_equal(reference(model_type="mlp"), tiers)
    pipeline = run_ranks("pipeline_parallel", ["stage"] * 2, small(model_type="mlp", blocks_per_rank=[3, 1]))
    check_equal(reference(model_type="mlp"), pipeline)


@pytest.mark.parametrize(
    ("recipe", "roles", "config"),
    [
        (
            "hierarchical_parallel",
            ["worker", "worker", "aggregator", "optimizer"],
            small(6) | {"multihost_config": {"bucket_megabytes": 0.01}},
        ),
        ("pipeline_parallel", ["stage"] * 3, small(6, blocks_per_rank=[1, 2, 1])),
        (
            "pipeline_parallel",
            ["stage"] * 4,
            small(6, blocks_per_rank=[2, 2], pipeline={"schedule": "interleaved", "chunks_per_rank": 2, "replicas": 2}),
        ),
        (
            "tensor_parallel",
            ["worker"] * 4,
            small(6) | {"tensor_parallel_config": {"ranks": 2, "replicas": 2}},
        ),
        (
            "hierarchical_parallel",
            ["worker"] * 4 + ["aggregator_optimizer"],
            small(6) | {"device_config": {"enable_tp": True, "enable_ddp": True, "mesh_shape": [2, 2]}},
        ),
        ("pipeline_parallel", ["stage"] * 4, small(6, blocks_per_rank=[2, 2], pipeline={"ranks_per_stage": 2})),
        ("fabric_minimal", ["peer"] * 3, {"all_reduce_config": {"megabytes": 0.1, "repeats": 2}}),
        (
            "sync_ps",
            ["worker"] * 2 + ["server"] * 2,
            small(6) | {"sync_ps_config": {"num_servers": 2}} | {"compression_config": {"kind": "int8"}},
        ),
        ("elastic_dp", ["worker"] * 2 + ["server"], small(6)),
    ],
)
def test_no_recipe_relies_on_buffered_sends(run_ranks, recipe, roles, config):
    """With synchronous sends a hidden deadlock is a visible one."""
    run = run_ranks(recipe, roles, config, environment={"TTLAUNCH_SYNCHRONOUS_SENDS": "1"}, timeout_s=60)
    assert run.process.returncode == 0, run.output


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_the_sum_over_all_ranks_is_right(run_ranks, peers):
    """B8."""
    config = {"all_reduce_config": {"megabytes": 0.2, "repeats": 3}}
    run = run_ranks("fabric_minimal", ["peer"] * peers, config)
    assert run.process.returncode == 0, run.output
    (total,) = (record["values"]["sum"] for record in run.all_records("result") if "sum" in record["values"])
    assert peers * (peers + 1) / 2 == total
    assert f"over {peers} ranks" in run.process.stdout


def test_a_vector_shorter_than_the_ring_is_summed_too(run_ranks):
    run = run_ranks("fabric_minimal", ["peer"] * 3, {"all_reduce_config": {"megabytes": 8e-6, "repeats": 1}})
    assert run.process.returncode == 0, run.output
    assert "in all 2 places" in run.process.stdout


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        ("raise ValueError('no such bucket')", "ValueError", "no such bucket"),
        ("raise SystemExit(0)", "SystemExit", "0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
    ],
)
def test_a_rank_that_raises_leaves_a_record_and_ends_the_world(run_ranks, tmp_path, statement, kind, message):
    trainer = (
        f"def peer(cfg, ctx):\n    if ctx.rank == 1:\n        {statement}\n    ctx.recv(torch.zeros(1), source=1)\n"
    )
    folder = write_peers(tmp_path / kind, trainer)
    run = run_ranks(folder, ["peer"] * 2, timeout_s=60)
    assert run.process.returncode != 0
    error = run.error(1)
    assert (kind, message, "peer", 0) == (error["type"], error["message"], error["role"], error["step"])
    assert (str(folder / "trainer.py"), 5) == (error["file"], error["line"])
    assert error["traceback"] in run.process.stderr
    assert run.error(0) is None
    assert run.records(1, contract.KIND_DONE) == []


def test_a_message_of_another_shape_names_the_peer(run_ranks, tmp_path):
    trainer = (
        "def peer(cfg, ctx):\n"
        "    if ctx.rank == 1:\n        ctx.send(torch.zeros(3), dest=0)\n        time.sleep(60)\n"
        "    ctx.recv(torch.zeros(2, 2, dtype=torch.float64), source=1)\n"
    )
    run = run_ranks(write_peers(tmp_path / "shapes", trainer), ["peer"] * 2, timeout_s=60)
    expected = "rank 1 (peer) sent float32 of shape (3,), expected float64 of shape (2, 2)"
    assert (expected, "CommunicationError") == (run.error(0)["message"], run.error(0)["type"])


def test_large_tensors_travel_in_chunks(run_ranks, tmp_path):
    trainer = (
        "import ttlaunch.runtime.comm.mpi as mpi\nmpi.CHUNK_BYTES = 1000\n"
        "def peer(cfg, ctx):\n"
        "    sent = torch.arange(7001.0)\n"
        "    if ctx.rank == 1:\n        return ctx.send(sent, dest=0)\n"
        "    found = torch.zeros(7001)\n    ctx.recv(found, source=1)\n    assert torch.equal(sent, found)\n"
    )
    run = run_ranks(write_peers(tmp_path / "chunks", trainer), ["peer"] * 2, timeout_s=60)
    assert run.process.returncode == 0, run.output


def test_a_world_of_the_wrong_size_is_named(run_ranks):
    """The mistake of another MPI's mpirun: N worlds of one rank, each of which would train alone."""
    run = run_ranks("fabric_minimal", ["peer"] * 4, mpirun_ranks=1)
    assert run.process.returncode != 0
    assert "the MPI world has 1 rank, the plan has 4" in run.error(0)["message"]


def test_another_text_than_the_launching_machines_is_refused(run_ranks, tmp_path):
    """The default corpus differs between versions of Python; every rank checks."""
    text = tmp_path / "text.txt"
    text.write_text("hello world, " * 1000)
    run = run_ranks("hierarchical_parallel", ["trainer"], small(), data=text, before=lambda: text.write_text("other"))
    assert "differs from the launching machine's" in run.error(0)["message"]


def test_a_rank_never_imports_the_compiler(run_ranks, tmp_path):
    """`torch.optim`'s classes pull in torch._dynamo: two seconds for each rank."""
    folder = tmp_path / "lean"
    folder.mkdir()
    source = Path(__file__).parents[2] / "recipes" / "hierarchical_parallel"
    for name in ("recipe.py", "traffic.py", "elastic.py"):
        (folder / name).write_text((source / name).read_text())
    check = "\n\n_trainer = trainer\ndef trainer(cfg, ctx):\n    import sys\n    _trainer(cfg, ctx)\n"
    check += "    assert 'torch._dynamo' not in sys.modules\n"
    (folder / "trainer.py").write_text((source / "trainer.py").read_text() + check)
    run = run_ranks(folder, ["trainer"], small(2), forks=False)
    assert run.process.returncode == 0, run.output
