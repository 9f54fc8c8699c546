"""Every rule about a configuration: the whole report of one that breaks it, and silence about the nearest that does not."""

import re
from pathlib import Path

import pytest

from ttlaunch.diagnostics import render
from ttlaunch.spec.recipe.config import check_config, check_one_process, load_config
from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe

ROOT = Path(__file__).parents[3]
TIERS, PIPELINE, DATA, SERVERS, TENSOR = (
    "hierarchical_parallel",
    "pipeline_parallel",
    "data_parallel",
    "sync_ps",
    "tensor_parallel",
)
STAGES = "multihost_config.pipeline_parallel_config"
TWO_STAGES = f"{STAGES}.blocks_per_rank=[2,2]"
LLAMA = "training_config.model_type=llama"
MARKOV = "data_config.source=markov"
BROKEN = [
    (TIERS, "transformer_config.num_heads=5", "transformer_config.embedding_dim=64"),
    (TENSOR, "tensor_parallel_config.ranks=3", "transformer_config.num_heads=3"),
    (TIERS, LLAMA, "transformer_config.num_kv_heads=3"),
    (TIERS, LLAMA, "transformer_config.num_heads=4", "transformer_config.embedding_dim=12"),
    (TIERS, LLAMA, "transformer_config.rope_scaling={low_freq_factor: 5}"),
    (TIERS, LLAMA, "transformer_config.activation=gelu_new"),
    (TIERS, "transformer_config.rope_theta=5000", "transformer_config.mlp_dim=64"),
    (TENSOR, LLAMA, "tensor_parallel_config.ranks=4", "transformer_config.num_kv_heads=2"),
    (TENSOR, LLAMA, "tensor_parallel_config.ranks=4", "transformer_config.mlp_dim=90"),
    (TIERS, "training_config.tokenizer_path=tokenizer.json"),
    (TIERS, f"training_config.tokenizer_sha256={'a' * 64}"),
    (TIERS, "training_config.micro_batch_size=17"),
    (TIERS, "training_config.learning_rate=1.5", "training_config.weight_decay=0"),
    (TIERS, "training_config.optimizer=sgd", "training_config.learning_rate=101", "training_config.weight_decay=0"),
    (TIERS, "training_config.learning_rate=0.5", "training_config.weight_decay=0.2"),
    (TIERS, "training_config.epsilon=1"),
    (TIERS, "scheduler_config.type=linear", "scheduler_config.warmup_steps=7", "training_config.steps=7"),
    (
        TIERS,
        "scheduler_config.type=cosine",
        "scheduler_config.warmup_steps=3",
        "scheduler_config.hold_steps=5",
        "training_config.steps=7",
    ),
    (TIERS, "loss_scale_config.initial_power=3", "loss_scale_config.min_power=4"),
    (TIERS, "loss_scale_config.initial_power=9", "loss_scale_config.max_power=8"),
    (TIERS, "loss_scale_config.initial_power=5", "loss_scale_config.min_power=6", "loss_scale_config.max_power=4"),
    (TIERS, "training_config.response_template=A>"),
    (TIERS, "training_config.instruction_template=Q>"),
    (TIERS, "multihost_config.num_workers=9", "training_config.batch_size=8"),
    (TIERS, "multihost_config.num_workers=3", "training_config.micro_batch_size=8", "training_config.batch_size=16"),
    (TIERS, "multihost_config.num_workers=2", "training_config.batch_size=1"),
    (
        TIERS,
        "multihost_config.num_workers=40",
        "training_config.micro_batch_size=2",
        "training_config.gradient_accumulation_steps=2",
    ),
    (TIERS, "device_config.mesh_shape=[1, 3]", "device_config.enable_tp=true"),
    (PIPELINE, f"{STAGES}=null"),
    (PIPELINE, f"{STAGES}.blocks_per_rank={{0: 2, 2: 2}}"),
    (PIPELINE, f"{STAGES}.blocks_per_rank=[0,4]"),
    (PIPELINE, f"{STAGES}.blocks_per_rank=[4,0,0]"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.num_blocks=1", "transformer_config.num_blocks=4"),
    (PIPELINE, f"{STAGES}.blocks_per_rank=[2,3]", "transformer_config.num_blocks=4"),
    (PIPELINE, f"{STAGES}.blocks_per_rank=[1]"),
    (PIPELINE, TWO_STAGES, "multihost_config.num_workers=3"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.replicas=2", "multihost_config.num_workers=2"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.ranks_per_stage=2", "multihost_config.num_workers=2"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.ranks_per_stage=3"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.schedule=interleaved", f"{STAGES}.chunks_per_rank=1"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.schedule=gpipe", f"{STAGES}.chunks_per_rank=2"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.schedule=1f1b", f"{STAGES}.chunks_per_rank=2"),
    (PIPELINE, f"{STAGES}.blocks_per_rank=[1,3]", f"{STAGES}.schedule=auto", f"{STAGES}.chunks_per_rank=2"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.replicas=3", "training_config.micro_batch_size=8"),
    (DATA, "compression_config.kind=int8", "data_parallel_config.reduction=fast"),
    (DATA, "compression_config.kind=top_k", "compression_config.error_feedback=false"),
    (DATA, "compression_config.kind=powersgd", "compression_config.error_feedback=false"),
    (DATA, "compression_config.kind=powersgd", "compression_config.rank=64", "transformer_config.embedding_dim=64"),
    (DATA, "compression_config.kind=bf16", "multihost_config.num_workers=4"),
    (DATA, "compression_config.kind=top_k", "compression_config.k=0.6"),
    (SERVERS, "compression_config.kind=top_k", "compression_config.k=0.5"),
    (SERVERS, "compression_config.kind=int8", "compression_config.block_size=1"),
    (SERVERS, "sync_ps_config.num_servers=7", "transformer_config.num_blocks=4"),
    (SERVERS, "sync_ps_config.polyak_decay=0.9"),
    (SERVERS, "sync_ps_config.slow_workers={2: 2.0}"),
    (SERVERS, "sync_ps_config.slow_workers={0: 2.0, 1: 2.0}", "multihost_config.num_workers=1"),
    ("elastic_dp", "training_config.precision=fp16", "training_config.early_stop_patience=1"),
    ("fully_sharded", "fully_sharded_config.replicas=2", "multihost_config.num_workers=3"),
    ("classic_dp", "multihost_config.socket_type=fabric", "classic_dp_config.staleness_bound=1"),
    ("local_sgd", "training_config.precision=fp16"),
    (TENSOR, "tensor_parallel_config.ranks=3", "transformer_config.num_heads=4"),
    (TENSOR, "tensor_parallel_config.ranks=3", "training_config.model_type=mlp", "transformer_config.embedding_dim=64"),
    (
        TENSOR,
        "tensor_parallel_config.ranks=3",
        "training_config.model_type=conv",
        "transformer_config.embedding_dim=64",
    ),
    (TENSOR, "tensor_parallel_config.replicas=3", "training_config.micro_batch_size=8"),
    (TIERS, "training_config.tokenizer_type=ids", "training_config.response_template=A>"),
    (
        TIERS,
        "training_config.model_type=conv",
        "training_config.tokenizer_type=char",
        "transformer_config.tie_embeddings=true",
    ),
    (TIERS, MARKOV, "data_config.vocabulary=3", "data_config.branching=4"),
    (TIERS, MARKOV, "training_config.model_type=conv"),
    (TIERS, MARKOV, "training_config.data_path=a.txt", "training_config.validation_fraction=0.2"),
    (TIERS, "multihost_config.pipeline_parallel_config={blocks_per_rank: [4]}"),
]
KEPT = [
    (TIERS, LLAMA, "transformer_config.num_kv_heads=1", "transformer_config.rope_scaling={low_freq_factor: 3.9}"),
    (
        TENSOR,
        LLAMA,
        "tensor_parallel_config.ranks=2",
        "transformer_config.num_kv_heads=2",
        "transformer_config.mlp_dim=90",
    ),
    (TIERS, "training_config.micro_batch_size=16", "multihost_config.num_workers=1"),
    (TIERS, "training_config.learning_rate=1", "training_config.weight_decay=0.05"),
    (
        TIERS,
        "training_config.optimizer=sgd",
        "training_config.learning_rate=100",
        "training_config.weight_decay=0.0005",
    ),
    (TIERS, "training_config.epsilon=0.999"),
    (TIERS, "training_config.optimizer=sgd", "training_config.epsilon=1"),
    (TIERS, "scheduler_config.type=linear", "scheduler_config.warmup_steps=6", "training_config.steps=7"),
    (TIERS, "scheduler_config.warmup_steps=8", "training_config.steps=7"),
    (TIERS, "loss_scale_config.initial_power=4", "loss_scale_config.min_power=4", "loss_scale_config.max_power=4"),
    (TIERS, "training_config.response_template=A>", "training_config.instruction_template=Q>"),
    (TIERS, "multihost_config.num_workers=2", "training_config.micro_batch_size=8"),
    (TIERS, "device_config.mesh_shape=[1, 4]", "device_config.enable_tp=true"),
    (PIPELINE, f"{STAGES}.blocks_per_rank={{1: 1, 0: 3}}", f"{STAGES}.num_blocks=4"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.replicas=2", f"{STAGES}.ranks_per_stage=2", "multihost_config.num_workers=8"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.schedule=interleaved", f"{STAGES}.chunks_per_rank=2"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.schedule=auto"),
    (PIPELINE, TWO_STAGES, f"{STAGES}.replicas=2", "training_config.micro_batch_size=8"),
    (DATA, "data_parallel_config.reduction=fast"),
    (DATA, "compression_config.kind=int8", "compression_config.error_feedback=false"),
    (DATA, "compression_config.kind=powersgd", "compression_config.rank=63"),
    (DATA, "compression_config.kind=bf16", "multihost_config.num_workers=3"),
    (DATA, "compression_config.kind=top_k", "compression_config.k=0.5", "multihost_config.num_workers=1"),
    (SERVERS, "compression_config.kind=top_k", "compression_config.k=0.49"),
    (SERVERS, "compression_config.kind=int8", "compression_config.block_size=2"),
    (SERVERS, "sync_ps_config.num_servers=6"),
    (SERVERS, "sync_ps_config.polyak_decay=0.9", "sync_ps_config.polyak_interval=1"),
    (SERVERS, "sync_ps_config.slow_workers={1: 2.0}"),
    ("elastic_dp", "training_config.precision=bf16"),
    ("fully_sharded", "fully_sharded_config.replicas=2", "multihost_config.num_workers=4"),
    ("classic_dp", "multihost_config.socket_type=fabric", "classic_dp_config.staleness_bound=0"),
    ("classic_dp", "multihost_config.socket_type=mpi", "classic_dp_config.staleness_bound=1"),
    ("local_sgd", "training_config.precision=bf16"),
    (TENSOR, "tensor_parallel_config.ranks=4"),
    (TENSOR, "tensor_parallel_config.ranks=8", "training_config.model_type=mlp"),
    (TENSOR, "tensor_parallel_config.ranks=8", "training_config.model_type=conv"),
    (TENSOR, "tensor_parallel_config.replicas=2", "training_config.micro_batch_size=8"),
    (TIERS, "training_config.tokenizer_type=ids"),
    (TIERS, "training_config.model_type=conv"),
    (TIERS, MARKOV, "data_config.vocabulary=4", "data_config.branching=4"),
]


def found_in(recipe, *overrides, layout=-1):
    """The diagnostics of the defaults of a recipe with these values, in one of its layouts."""
    declared = load_recipe(find_recipe(recipe, working_folder=Path("/")))
    loaded = load_config(declared, None, overrides=overrides)
    return [*loaded.diagnostics, *check_config(declared, loaded, declared.layouts[layout])]


def report(recipe, *overrides):
    """What is reported in the layout of the most ranks."""
    return render(found_in(recipe, *overrides))


def test_every_broken_rule_is_reported_at_the_keys_with_its_numbers(golden):
    reports = {" ".join(case): report(*case) for case in BROKEN}
    assert [] == [case for case, text in reports.items() if not text]
    golden("rules.txt", "\n".join(f"$ {case}\n{text}" for case, text in reports.items()))


@pytest.mark.parametrize("case", KEPT, ids=" ".join)
def test_a_value_just_within_a_rule_is_accepted(case):
    assert "" == report(*case)


@pytest.mark.parametrize("case", BROKEN, ids=" ".join)
def test_one_process_breaks_no_rule_about_sharing(case):
    """It has no workers, servers or stages that could be too many; what it computes is the same."""
    sharing = {"C006", "C011", "C016", "C061", "C065", "C080"} | ({"C037"} if TENSOR in case else set())
    expected = [diagnostic for diagnostic in found_in(*case) if diagnostic.code not in sharing]
    fewer = "moves no fewer bytes"  # which depends on how many workers there are
    assert [one for one in expected if fewer not in one.message] == found_in(*case, layout=0)


def test_every_rule_about_a_configuration_has_an_example_here():
    files = [*(ROOT / "ttlaunch/spec/recipe").glob("*.py"), *(ROOT / "recipes").glob("*/*.py")]
    found = {code for file in files for code in re.findall(r'Problem\(\s*"(C\d+)"', file.read_text(encoding="utf-8"))}
    elsewhere = {"C043", "C090"}  # of commands: `simulate` and `--naive`
    assert found - elsewhere <= {code for case in BROKEN for code in re.findall(r"\[(C\d+)\]", report(*case))}


@pytest.mark.parametrize(
    ("recipe", "key", "message"),
    [
        (
            "data_parallel",
            "data_parallel_config.reduction=fast",
            "`reduction` is `fast`, which needs a process for each rank; they share one here",
        ),
        (
            "fully_sharded",
            "multihost_config.enabled=true",
            "`enabled` is `true`, which needs a process for each rank; they share one here",
        ),
    ],
)
def test_what_needs_processes_cannot_share_one_unless_there_is_one_rank(recipe, key, message):
    declared = load_recipe(find_recipe(recipe, working_folder=Path("/")))
    loaded = load_config(declared, None, overrides=[key])
    (found,) = check_one_process(declared, loaded, world_size=2)
    assert ("C043", message) == (found.code, found.message)
    assert [] == check_one_process(declared, loaded, world_size=1)
