"""Rules about configurations that go beyond the types; a recipe lists those that apply to it in `checks`."""

from collections.abc import Iterator
from typing import Any

from ttlaunch.diagnostics import Severity
from ttlaunch.diagnostics.count import counted
from ttlaunch.spec.recipe.compression import pushes_are_compressed
from ttlaunch.spec.recipe.declare import Check, Layout, Problem
from ttlaunch.spec.recipe.images import text_keys_need_text
from ttlaunch.spec.recipe.llama import keys_of_llama_need_one, llama_heads_fit, llama_positions_fit
from ttlaunch.spec.recipe.sections import PipelineParallelConfig, TrainingConfig, TrainingFile
from ttlaunch.spec.recipe.synthetic import generated_data_fit_the_training

_HIGHEST_ADAMW_RATE = 1.0
_HIGHEST_SGD_RATE = 100.0
_HIGHEST_SHRINK = 0.05
_PIPELINE = "multihost_config.pipeline_parallel_config"
_BLOCKS_PER_RANK = f"{_PIPELINE}.blocks_per_rank"
_MODEL_BLOCKS = "transformer_config.num_blocks"


def heads_divide_the_embedding(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Every attention head gets the same share of the embedding."""
    model = config.transformer_config
    if model.embedding_dim % model.num_heads:
        yield Problem(
            "C026",
            f"`embedding_dim` {model.embedding_dim} is not a multiple of `num_heads` {model.num_heads}",
            "transformer_config.num_heads",
            f"{model.embedding_dim} / {model.num_heads} leaves {model.embedding_dim % model.num_heads}",
            others=(("transformer_config.embedding_dim", "shared by the heads"),),
        )


def a_micro_batch_fits_the_step(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """A step has at least as many sequences as one of its micro-batches."""
    training = config.training_config
    if training.sequences_per_micro_batch > training.sequences_per_step:
        sequences = counted(training.sequences_per_step, "sequence")
        yield Problem(
            "C027",
            f"`micro_batch_size` is {training.micro_batch_size} but a step has {sequences}",
            "training_config.micro_batch_size",
            f"{training.gradient_accumulation_steps} × {training.batch_size} = {sequences}",
            others=(("training_config.batch_size", "sequences of one accumulation"),),
        )


def rates_can_train(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Warn about a rate with which no model learns, such as one without its minus sign or decimal point."""
    training = config.training_config
    adamw, shrink = training.optimizer == "adamw", training.learning_rate * training.weight_decay
    highest = _HIGHEST_ADAMW_RATE if adamw else _HIGHEST_SGD_RATE
    if training.learning_rate > highest:
        message = f"`learning_rate` is {training.learning_rate:g}; {training.optimizer} is not known to train above {highest:g}"
        yield Problem("C028", message, "training_config.learning_rate", severity=Severity.WARNING)
    elif shrink > _HIGHEST_SHRINK:
        message = f"`weight_decay` takes {shrink:.0%} off every matrix in every step"
        product = f"{training.learning_rate:g} × {training.weight_decay:g} = {shrink:g}"
        others = (("training_config.learning_rate", "times this"),)
        key = "training_config.weight_decay"
        yield Problem("C028", message, key, product, others=others, severity=Severity.WARNING)
    if adamw and training.epsilon >= 1:
        message = f"`epsilon` is {training.epsilon:g}, which hides the second moment of every gradient"
        key = "training_config.epsilon"
        yield Problem("C028", message, key, "expected a number near 1e-8", severity=Severity.WARNING)


def the_rate_has_steps_to_fall(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Warn if warm-up and hold leave the linear or cosine schedule no step, so that the rate never falls."""
    schedule, steps = config.scheduler_config, config.training_config.steps
    taken = schedule.warmup_steps + schedule.hold_steps
    if schedule.type != "constant" and taken >= steps:
        yield Problem(
            "C032",
            f"the learning rate never falls: warm-up and hold take all {counted(steps, 'step')}",
            "scheduler_config.hold_steps" if schedule.hold_steps else "scheduler_config.warmup_steps",
            f"{schedule.warmup_steps} + {schedule.hold_steps} = {counted(taken, 'step')}",
            others=(("training_config.steps", "that training has"),),
            severity=Severity.WARNING,
        )


def the_scale_is_within_its_bounds(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """The first loss scale lies between the smallest and the largest allowed scale."""
    scale = config.loss_scale_config
    if scale.min_power <= scale.initial_power <= scale.max_power:
        return
    is_low = scale.initial_power < scale.min_power
    bound, key = (scale.min_power, "min_power") if is_low else (scale.max_power, "max_power")
    yield Problem(
        "C033",
        f"`initial_power` is {scale.initial_power}, which is {'below' if is_low else 'above'} `{key}` {bound}",
        "loss_scale_config.initial_power",
        f"expected {scale.min_power} to {scale.max_power}" if scale.min_power <= scale.max_power else "",
        others=((f"loss_scale_config.{key}", "the bound"),),
    )


def templates_come_in_pairs(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """If only responses count in the loss, both templates are given: that of instructions and that of responses."""
    training = config.training_config
    given = {key: getattr(training, key) for key in ("response_template", "instruction_template")}
    missing = [key for key, text in given.items() if text is None]
    if len(missing) == 1:
        (there,) = given.keys() - missing
        ends = "where a response ends" if there == "response_template" else "which tokens count in the loss"
        yield Problem(
            "C030",
            f"`{there}` needs `{missing[0]}` to say {ends}",
            f"training_config.{there}",
            "given without the other",
        )


GENERAL = (
    text_keys_need_text,
    generated_data_fit_the_training,
    heads_divide_the_embedding,
    llama_heads_fit,
    llama_positions_fit,
    keys_of_llama_need_one,
    a_micro_batch_fits_the_step,
    rates_can_train,
    the_rate_has_steps_to_fall,
    the_scale_is_within_its_bounds,
    templates_come_in_pairs,
)
"""Rules that hold for every recipe that trains a model; no recipe has to list them."""


def every_worker_has_a_micro_batch(config: TrainingFile, layout: Layout) -> Iterator[Problem]:
    """Every worker has a micro-batch (M ≥ W); ranks that split a model have the same ones."""
    workers = layout.counts(config).get("worker", 0) // config.device_config.split_ranks
    training = config.training_config
    if workers <= training.micro_batches:
        return
    label, hint = f"more than the {_micro_batches(training)} of a step", _smaller_batches(training, workers)
    message = f"{counted(workers, 'worker')} share {_micro_batches(training)}; each needs at least one"
    others = [_batch(training)]
    devices = config.device_config.local_ranks // config.device_config.split_ranks
    if devices > 1:
        given = counted(config.multihost_config.num_workers, "worker")
        others.append(("device_config.mesh_shape", f"{given} with {devices} devices each = {workers}"))
    yield Problem("C011", message, "multihost_config.num_workers", label, others=tuple(others), hints=(hint,))


def _micro_batches(training: TrainingConfig) -> str:
    return counted(training.micro_batches, "micro-batche" if training.micro_batches > 1 else "micro-batch")


def _batch(training: TrainingConfig) -> tuple[str, str]:
    """Return the key of the batch size, and how its micro-batches are counted."""
    sequences = counted(training.sequences_per_step, "sequence")
    cut = f"{sequences} / {training.sequences_per_micro_batch} = {_micro_batches(training)}"
    return "training_config.batch_size", f"a step has {cut}"


def _smaller_batches(training: TrainingConfig, parts: int) -> str:
    """Return a hint with a batch size that gives each of this many parts a micro-batch."""
    if smaller := training.sequences_per_step // parts:
        return f"`--set training_config.micro_batch_size={smaller}`"
    larger = -(-parts // training.gradient_accumulation_steps)
    hint = f"--set training_config.batch_size={larger}"
    if training.model_copy(update={"batch_size": larger}).micro_batches < parts:  # each would have several sequences
        hint += " --set training_config.micro_batch_size=1"
    return f"`{hint}`"


def every_stage_has_a_block(config: TrainingFile, layout: Layout) -> Iterator[Problem]:
    """The blocks of the stages add up to the model's, and no stage is empty."""
    pipeline = config.multihost_config.pipeline_parallel_config
    if pipeline is None:
        if "stage" in layout.roles:
            yield Problem(
                "C006",
                "`pipeline_parallel_config` is missing in `multihost_config`",
                key="multihost_config",
                label="has no `pipeline_parallel_config`",
                hints=("give the blocks of each stage: `pipeline_parallel_config: {blocks_per_rank: [2, 2]}`",),
            )
        return
    if isinstance(pipeline.blocks_per_rank, dict) and sorted(pipeline.blocks_per_rank) != list(
        range(len(pipeline.blocks_per_rank))
    ):
        stages = ", ".join(str(stage) for stage in sorted(pipeline.blocks_per_rank))
        yield Problem(
            "C013", f"`blocks_per_rank` names stages {stages}; they count from 0 without a gap", _BLOCKS_PER_RANK
        )
        return
    yield from _blocks_of_stages(pipeline, model_blocks=config.transformer_config.num_blocks)


def _blocks_of_stages(pipeline: PipelineParallelConfig, *, model_blocks: int) -> Iterator[Problem]:
    blocks = pipeline.blocks
    if pipeline.num_blocks not in (None, model_blocks):
        yield Problem(
            "C015",
            f"the pipeline splits {counted(pipeline.num_blocks, 'block')} but the model has {model_blocks} of them",
            "multihost_config.pipeline_parallel_config.num_blocks",
            others=((_MODEL_BLOCKS, "the model's size"),),
            hints=("one of both keys suffices; remove the wrong one",),
        )
    if sum(blocks) not in (model_blocks, pipeline.num_blocks):  # if it is one of two numbers, C015 is the mistake
        total = " + ".join(str(count) for count in blocks)
        yield Problem(
            "C012",
            f"`blocks_per_rank` adds up to {sum(blocks)} but the model has {counted(model_blocks, 'block')}",
            _BLOCKS_PER_RANK,
            f"{total} = {counted(sum(blocks), 'block')}" if len(blocks) > 1 else counted(sum(blocks), "block"),
            others=((_MODEL_BLOCKS, f"the model has {counted(model_blocks, 'block')}"),),
            hints=()
            if pipeline.num_blocks
            else (f"`--set {_MODEL_BLOCKS}={sum(blocks)}`, or change `blocks_per_rank`",),
        )


def num_workers_counts_the_stages(config: TrainingFile, layout: Layout) -> Iterator[Problem]:
    """In a pipeline every rank is a stage, so `num_workers`, if it is given, must equal the stages of `blocks_per_rank`."""
    stages = layout.counts(config).get("stage", 0)
    pipeline = config.multihost_config.pipeline_parallel_config
    given = "num_workers" in config.multihost_config.model_fields_set
    if given and stages and pipeline is not None and config.multihost_config.num_workers != stages:
        replicas = f" in each of {pipeline.replicas} replicas" if pipeline.replicas > 1 else ""
        counted_stages = counted(len(pipeline.blocks), "stage")
        counted_stages += f" of {pipeline.ranks_per_stage} ranks" if pipeline.ranks_per_stage > 1 else ""
        yield Problem(
            "C016",
            f"`num_workers` is {config.multihost_config.num_workers} but `blocks_per_rank` has {counted_stages}{replicas}",
            "multihost_config.num_workers",
            "in a pipeline every rank is a stage" if pipeline.ranks_per_stage == 1 else f"there are {stages} ranks",
            others=((_BLOCKS_PER_RANK, counted_stages),),
            hints=("remove `num_workers`",),
        )


def the_schedule_fits_the_chunks(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """The interleaved schedule needs several chunks per rank, with equally many blocks; other schedules have one chunk."""
    pipeline = config.multihost_config.pipeline_parallel_config
    if pipeline is None:
        return
    chunks = pipeline.chunks_per_rank
    if pipeline.schedule == "interleaved" and chunks == 1:
        yield Problem(
            "C035",
            "`schedule` is `interleaved` but a rank has 1 chunk of the model",
            f"{_PIPELINE}.schedule",
            "needs 2 chunks a rank or more",
            others=((f"{_PIPELINE}.chunks_per_rank", "1 chunk"),),
            hints=(f"`--set {_PIPELINE}.chunks_per_rank=2`", f"`--set {_PIPELINE}.schedule=1f1b`"),
        )
    if pipeline.schedule in {"gpipe", "1f1b"} and chunks > 1:
        yield Problem(
            "C035",
            f"`chunks_per_rank` is {chunks} but schedule `{pipeline.schedule}` has 1 chunk a rank",
            f"{_PIPELINE}.chunks_per_rank",
            "only `interleaved` and `auto` cut a rank's blocks",
            others=((f"{_PIPELINE}.schedule", "1 chunk a rank"),),
            hints=(f"`--set {_PIPELINE}.schedule=interleaved`", "remove `chunks_per_rank`"),
        )
        return
    for stage, blocks in enumerate(pipeline.blocks):
        if blocks % chunks:
            yield Problem(
                "C036",
                f"stage {stage} has {counted(blocks, 'block')}, which {chunks} equal chunks cannot share",
                _BLOCKS_PER_RANK,
                f"{blocks} / {chunks} leaves {blocks % chunks}",
                others=((f"{_PIPELINE}.chunks_per_rank", f"{chunks} chunks a rank"),),
                hints=("give every stage a multiple of `chunks_per_rank`",),
            )
            return


def every_replica_has_a_micro_batch(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Every pipeline has a micro-batch (M ≥ R)."""
    pipeline = config.multihost_config.pipeline_parallel_config
    if pipeline is not None:
        yield from models_have_a_micro_batch(config, replicas=pipeline.replicas, key=f"{_PIPELINE}.replicas")


def models_have_a_micro_batch(config: TrainingFile, *, replicas: int, key: str) -> Iterator[Problem]:
    """Each of several parallel models, whose number a key sets, has a micro-batch (M ≥ R)."""
    training = config.training_config
    if replicas <= training.micro_batches:
        return
    label, hint = f"more than the {_micro_batches(training)} of a step", _smaller_batches(training, replicas)
    message = f"{replicas} replicas share {_micro_batches(training)}; each needs at least one"
    yield Problem("C037", message, key, label, others=(_batch(training),), hints=(hint,))


def every_replica_has_as_many_workers(config: Any, layout: Layout) -> Iterator[Problem]:
    """The replicas of `fully_sharded_config` share the workers evenly."""
    workers, replicas = layout.counts(config).get("worker", 0), config.fully_sharded_config.replicas
    if workers % replicas:
        yield Problem(
            "C065",
            f"{workers} workers cannot be shared evenly by {replicas} replicas",
            "fully_sharded_config.replicas",
            f"{workers} / {replicas} leaves {workers % replicas}",
            others=(("multihost_config.num_workers", "shared by the replicas"),),
            hints=("`replicas: 1` fits any number of workers",),
        )


def servers_can_share_the_model(config: Any, layout: Layout) -> Iterator[Problem]:
    """Apply the rules of `sync_ps_config` and of the messages to servers, but not those for slow workers."""
    yield from pushes_are_compressed(config, layout)
    yield from _every_server_has_a_layer(config, layout)
    yield from _an_average_counts_some_weights(config, layout)


def _every_server_has_a_layer(config: Any, _layout: Layout) -> Iterator[Problem]:
    """Servers share the model by layers: embedding, blocks and head."""
    servers, blocks = config.sync_ps_config.num_servers, config.transformer_config.num_blocks
    if servers > blocks + 2:
        yield Problem(
            "C070",
            f"{servers} servers share {blocks + 2} layers; each needs at least one",
            "sync_ps_config.num_servers",
            "more than there are layers",
            others=(("transformer_config.num_blocks", f"embedding + {blocks} + head = {blocks + 2} layers"),),
            hints=(f"`--set sync_ps_config.num_servers={blocks + 2}`",),
        )


def _an_average_counts_some_weights(config: Any, _layout: Layout) -> Iterator[Problem]:
    """Warn if the average of the weights is configured but never computed."""
    servers = config.sync_ps_config
    if servers.polyak_decay is not None and servers.polyak_interval is None:
        yield Problem(
            "C062",
            f"`polyak_decay` is {servers.polyak_decay:g}, but without `polyak_interval` there is no average",
            "sync_ps_config.polyak_decay",
            "set, but without effect",
            hints=("`--set sync_ps_config.polyak_interval=10`",),
            severity=Severity.WARNING,
        )


def slow_workers_are_there(section: str) -> Check:
    """Make the rule that every worker named in `slow_workers` of a section exists.

    Args:
        section: The section's name.
    """

    def check(config: Any, layout: Layout) -> Iterator[Problem]:
        workers = layout.counts(config).get("worker", 0)
        missing = [place for place in getattr(config, section).slow_workers if place >= workers]
        if workers and missing:
            yield Problem(
                "C061",
                f"`slow_workers` slows worker {missing[0]}, and the run has {counted(workers, 'worker')}",
                f"{section}.slow_workers",
                f"expected 0 to {workers - 1}" if workers > 1 else "expected 0",
            )

    return check


def gradients_may_be_stale(config: Any, _layout: Layout) -> Iterator[Problem]:
    """No key is set that needs all ranks to be in the same step."""
    training = config.training_config
    if training.precision == "fp16":
        yield Problem(
            "C072",
            "`precision` is fp16, whose loss scale changes from step to step",
            "training_config.precision",
            "a stale gradient has another scale than the server's",
            hints=("`--set training_config.precision=bf16`",),
        )
    if training.early_stop_patience is not None:
        yield Problem(
            "C073",
            "`early_stop_patience` is set, but training does not wait for its validations here",
            "training_config.early_stop_patience",
            "the step after which it would end is random",
            hints=("`--set training_config.early_stop_patience=null`",),
        )
