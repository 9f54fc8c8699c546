"""The training file: its sections, and every key with its unit or meaning, default and bounds.

The names are those of the vendor's training files where they exist. The reference page of the configuration is
generated from here. A batch is defined once, in `TrainingConfig`, and never depends on the number of workers.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ttlaunch.spec.located.schema import Section
from ttlaunch.spec.recipe.bits import Bits, ReadOnlyWith

Positive = Annotated[int, Field(ge=1, le=10**9)]
"""From 1 to a billion; a larger number is a typing mistake, because no machine could handle it."""
Size = Annotated[int, Field(ge=1, le=10**6)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Power = Annotated[int, Field(ge=-24, le=100)]
"""An exponent of two; float32 can still hold a gradient that is multiplied by this power."""
Fraction = Annotated[float, Field(ge=0, lt=1)]


class TrainingConfig(Section):
    """The length, the data and the optimizer of the training. One step sees `gradient_accumulation_steps × batch_size` sequences."""

    seed: NonNegative = Field(0, description="seed of weights, data order and dropout")
    steps: Annotated[Positive, Bits.LENGTH] = Field(
        100, description="optimizer steps; training ends earlier if `num_epochs` is used up"
    )
    num_epochs: Annotated[Positive | None, Bits.LENGTH] = Field(
        None, description="maximum number of passes over the training text; null: no limit"
    )
    batch_size: Size = Field(16, description="sequences of one accumulation, summed over all workers")
    gradient_accumulation_steps: Size = Field(
        1, description="number of batches whose gradients are added up for one optimizer step"
    )
    micro_batch_size: Positive | None = Field(
        None, description="sequences of one forward pass; null: batch_size // 8, at least 1"
    )
    model_type: Annotated[Literal["gpt", "llama", "mlp", "conv"], Bits.SHAPE] = Field(
        "gpt",
        description="gpt: transformer, as GPT-2; llama: transformer, as Llama; mlp: feed-forward, fixed context; "
        "conv: convolutions, for images",
    )
    # The path is marked as free, because `--resume` compares the SHA-256 of the text instead.
    data_path: Annotated[Annotated[str, Field(min_length=1)] | None, Bits.FREE] = Field(
        None,
        description="for text: UTF-8 file or folder of them, null: the sources of Python's standard library; "
        "for images: file with one image per line, null: scikit-learn's handwritten digits",
    )
    tokenizer_type: Annotated[Literal["byte", "char", "ids"], Bits.SHAPE] = Field(
        "byte", description="byte: 256 tokens; char: those in the text; ids: a file of `ttlaunch data --tokenizer`"
    )
    tokenizer_path: Annotated[Annotated[str, Field(min_length=1)] | None, Bits.FREE] = Field(
        None,
        description="for tokenizer_type ids: a tokenizer.json that makes tokens of a text before the start; `initial_weights` "
        "of `hf:FOLDER` sets it",
    )
    tokenizer_sha256: Annotated[Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None, Bits.FREE] = Field(
        None, description="the SHA-256 that the file of tokenizer_path must have; null: any"
    )
    response_template: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="text that begins a response; only tokens of responses count in the loss; null: all do"
    )
    instruction_template: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="text that begins an instruction and so ends the response before it; required with response_template",
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="share of the text kept for validation"
    )
    validation_interval: Annotated[Positive, Bits.FREE] = Field(
        20, description="steps between validations; the first and last step always have one"
    )
    validation_sequences: Annotated[Positive, Bits.FREE] = Field(
        32, description="sequences of one validation; fewer if the validation text is shorter"
    )
    verify_interval: Annotated[Positive | None, Bits.FREE] = Field(
        20,
        description="steps between comparisons of the digests of tensors that several ranks hold; also at every checkpoint; "
        "null: only there",
    )
    audit_interval: Annotated[Positive | None, Bits.FREE] = Field(
        None,
        description="steps between audits, in which each worker also computes the micro-batches of another one and both compare "
        "digests; null: no audits; `--audit 1/K` sets it to K",
    )
    early_stop_patience: Annotated[Positive | None, Bits.FREE] = Field(
        None,
        description="validations in a row without improvement after which training ends; null: it never ends early",
    )
    early_stop_min_delta: Annotated[float, Field(ge=0), Bits.FREE] = Field(
        0.0, description="nats by which the validation loss must fall below its best to count as an improvement"
    )
    log_layer_grad_norms: Annotated[bool, Bits.FREE] = Field(
        default=False, description="report the norm of each layer's gradient at every validation after a step"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="number format of matrix products and attention; weights, gradients and their sums are always fp32",
    )
    activation_checkpointing: Annotated[bool, Bits.FREE] = Field(
        default=False, description="compute each block again in the backward pass instead of keeping its activations"
    )
    on_not_finite: Annotated[Literal["stop", "skip", "continue"], Bits.FREE] = Field(
        "stop",
        description="before an update with a gradient whose norm is NaN or infinite; stop: the run ends, and no weight gets such a "
        "value; skip: that update is left out; continue: it is made; fp16 always skips",
    )
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="update rule")
    learning_rate: PositiveFloat = Field(3e-3, description="peak of the schedule, per step")
    beta1: Fraction = Field(0.9, description="AdamW: decay of the mean of gradients; SGD: momentum")
    beta2: Annotated[Fraction, ReadOnlyWith("training_config.optimizer", "adamw")] = Field(
        0.95, description="AdamW: decay of the mean of squared gradients"
    )
    epsilon: Annotated[float, Field(ge=1e-38), ReadOnlyWith("training_config.optimizer", "adamw")] = Field(
        1e-8, description="AdamW: added to the root of the second moment"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="decoupled, on tensors of two dimensions")
    use_clip_grad_norm: bool = Field(
        default=True, description="limit the norm of a step's gradient to clip_grad_norm_max_norm"
    )
    clip_grad_norm_max_norm: Annotated[
        PositiveFloat, ReadOnlyWith("training_config.use_clip_grad_norm", value=True)
    ] = Field(1.0, description="maximum Euclidean norm of the gradient of all parameters")

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def sequences_per_micro_batch(self) -> int:
        return self.micro_batch_size or max(1, self.batch_size // 8)

    @property
    def updates_need_the_norm(self) -> bool:
        """Return whether no weight may change before the gradient's norm is known: to clip it, or to skip the update."""
        return self.use_clip_grad_norm or self.skips_updates

    @property
    def skips_updates(self) -> bool:
        """Return whether the update of a gradient whose norm is not finite is left out."""
        return self.precision == "fp16" or self.on_not_finite == "skip"

    @property
    def micro_batches(self) -> int:
        """Return M, the micro-batches of one step; the last one is smaller if the sizes do not divide."""
        return -(-self.sequences_per_step // self.sequences_per_micro_batch)


class DataConfig(Section):
    """Where training data come from: a file, or a Markov chain that draws them from a seed, the same on every rank."""

    marks: ClassVar[tuple[Any, ...]] = (ReadOnlyWith("data_config.source", "markov"),)

    source: Literal["file", "markov"] = Field(
        "file",
        description="file: what training_config.data_path names; markov: sequences generated from a seed, without a file",
    )
    vocabulary: Annotated[int, Field(ge=2, le=2**16), Bits.SHAPE] = Field(
        64, description="markov: number of different tokens"
    )
    order: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="markov: number of tokens that decide which may follow"
    )
    branching: Size = Field(
        4, description="markov: number of equally likely next tokens, which is the perplexity of a perfect model"
    )
    sequences: Annotated[int, Field(ge=1, le=10**7)] = Field(
        10_000, description="markov: training sequences of an epoch; validations use different ones"
    )
    seed: NonNegative = Field(
        0, description="markov: seed of the chain and its sequences, independent of training_config.seed"
    )


_LLAMA = ReadOnlyWith("training_config.model_type", "llama")


class RopeScalingConfig(Section):
    """How Llama 3 stretches rotary positions, so that a model reads longer texts than its first training had."""

    factor: Annotated[float, Field(ge=1, le=10**6)] = Field(
        8.0, description="by how much the slowest rotations are slowed down"
    )
    low_freq_factor: Annotated[float, Field(gt=0, le=10**6)] = Field(
        1.0, description="rotations with fewer turns than this in `original_length` tokens are slowed down in full"
    )
    high_freq_factor: Annotated[float, Field(gt=0, le=10**6)] = Field(
        4.0, description="rotations with more turns than this in `original_length` tokens stay as they are"
    )
    original_length: Annotated[int, Field(ge=1, le=10**7)] = Field(
        8192, description="tokens of a sequence in the first training"
    )


class TransformerConfig(Section):
    """The size of the model."""

    num_blocks: Annotated[Size, Bits.SHAPE] = Field(4, description="blocks between embedding and head")
    num_heads: Annotated[Size, Bits.SHAPE] = Field(4, description="attention heads of a block; divides embedding_dim")
    embedding_dim: Annotated[Size, Bits.SHAPE] = Field(64, description="width of the residual stream")
    max_sequence_length: Annotated[int, Field(ge=2, le=10**7), Bits.SHAPE] = Field(
        64, description="tokens of one sequence"
    )
    dropout_prob: Fraction = Field(0.0, description="share of activations dropped while training")
    tie_embeddings: Annotated[bool, Bits.SHAPE] = Field(
        default=False, description="the head's matrix is that of the token embedding"
    )
    activation: Annotated[Literal["gelu", "gelu_new"], Bits.SHAPE] = Field(
        "gelu",
        description="inside feed-forward layers; gelu: exact; gelu_new: its approximation by tanh, as GPT-2 has it; "
        "a llama has silu",
    )
    num_kv_heads: Annotated[Size | None, Bits.SHAPE, _LLAMA] = Field(
        None, description="llama: heads of keys and values, which heads share; divides num_heads; null: num_heads"
    )
    mlp_dim: Annotated[Size | None, Bits.SHAPE, _LLAMA] = Field(
        None, description="llama: width of a feed-forward layer inside; null: 4 × embedding_dim"
    )
    norm_epsilon: Annotated[float, Field(gt=0, lt=1), Bits.SHAPE, _LLAMA] = Field(
        1e-5, description="llama: added to the mean square in a norm"
    )
    rope_theta: Annotated[float, Field(ge=1, le=10**12), Bits.SHAPE, _LLAMA] = Field(
        10_000.0,
        description="llama: base of the rotary positions; the slowest turns once in 2π × it tokens, or a little less",
    )
    rope_scaling: Annotated[RopeScalingConfig | None, Bits.SHAPE, _LLAMA] = Field(
        None, description="llama: stretched rotary positions, as in Llama 3; null: positions as they are"
    )
    max_position_embeddings: Annotated[int | None, Field(ge=2, le=10**8), Bits.FREE, _LLAMA] = Field(
        None,
        description="llama: tokens of the longest text for which the model was made, which `serve --max-context` may use and "
        "an export states; null: max_sequence_length",
    )

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def inner_width(self) -> int:
        """Return the width of a feed-forward layer inside."""
        return self.mlp_dim or 4 * self.embedding_dim


class PipelineParallelConfig(Section):
    """How the model's blocks are divided among pipeline stages, in which order these compute, and the number of pipelines."""

    num_blocks: Size | None = Field(
        None,
        description="number of the model's blocks; null: that of transformer_config; two that differ are an error",
    )
    blocks_per_rank: (
        Annotated[list[Size], Field(min_length=1)] | Annotated[dict[NonNegative, Size], Field(min_length=1)]
    ) = Field(description="blocks of each stage, as a list or as {stage: blocks}; the sum is num_blocks")
    schedule: Literal["gpipe", "1f1b", "interleaved", "auto"] = Field(
        "1f1b", description="order of the passes; auto: the fastest of the others, measured in the first steps"
    )
    chunks_per_rank: Size = Field(
        1, description="equal parts into which `interleaved` divides each stage's blocks; 1 for other schedules"
    )
    replicas: Size = Field(1, description="pipelines side by side, each with a share of the micro-batches")
    ranks_per_stage: Size = Field(1, description="ranks that split the matrices of a stage; divides num_heads")

    @property
    def blocks(self) -> list[int]:
        """Return the blocks of each stage, in order."""
        if isinstance(self.blocks_per_rank, dict):
            return [self.blocks_per_rank[stage] for stage in sorted(self.blocks_per_rank)]
        return self.blocks_per_rank


class MultihostConfig(Section):
    """The number of ranks, and the kind of socket between them."""

    marks: ClassVar[tuple[Any, ...]] = (Bits.FREE,)

    enabled: Annotated[bool, Bits.SENDERS] = Field(
        default=True, description="false: one process, the reference that other layouts must equal"
    )
    num_workers: Annotated[Positive, Bits.SENDERS] = Field(
        2, description="ranks that compute gradients; each needs at least one micro-batch"
    )
    socket_type: Literal["mpi", "grpc", "fabric"] = Field(
        "mpi",
        description="mpi: host memory; grpc: the same without MPI; fabric: device to device, by NCCL on CUDA devices, else by gloo",
    )
    bucket_megabytes: Annotated[float, Field(gt=0, le=10**5)] | None = Field(
        None, description="megabytes of gradient in one message; null: the size that makes the first steps fastest"
    )
    pipeline_parallel_config: PipelineParallelConfig | None = Field(None, description="stages of the pipeline recipe")


class DeviceConfig(Section):
    """The device on which a rank computes."""

    device: Annotated[Literal["cpu", "cuda", "auto"], Bits.DEVICE] = Field(
        "cpu", description="auto: cuda where a rank has it, else cpu"
    )
    threads_per_rank: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="torch threads; 1 gives the same bits on every host"
    )
    deterministic: Annotated[bool, Bits.DEVICE] = Field(
        default=True,
        description="on CUDA devices: only kernels that add in one order; false: others too, with other bits in each run",
    )
    mesh_shape: Annotated[Annotated[list[Positive], Field(min_length=2, max_length=2)] | None, Bits.FREE] = Field(
        None,
        description="rows and columns of the devices of a rank; of a worker with enable_ddp or enable_tp; null: one device",
    )
    enable_ddp: Annotated[bool, Bits.FREE] = Field(
        default=False, description="run a rank on each device of a worker, which sends the sum of their gradients"
    )
    # Marked as free, because only rounding depends on which rank has which part of a matrix.
    enable_tp: Annotated[bool, Bits.FREE] = Field(
        default=False,
        description="run a rank on each device of a worker and split the model over them; with enable_ddp over each row",
    )

    @property
    def local_ranks(self) -> int:
        """Return the number of ranks of a worker: one for each device of `mesh_shape` with `enable_ddp` or `enable_tp`, else 1."""
        if self.mesh_shape is None or not (self.enable_ddp or self.enable_tp):
            return 1
        return self.mesh_shape[0] * self.mesh_shape[1]

    @property
    def split_ranks(self) -> int:
        """Return the number of ranks of a worker that split one model: those of a row with `enable_ddp`, otherwise all."""
        if not self.enable_tp or self.mesh_shape is None:
            return 1
        return self.mesh_shape[1] if self.enable_ddp else self.local_ranks


class SchedulerConfig(Section):
    """How the learning rate changes from step to step."""

    type: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_steps: NonNegative = Field(0, description="steps of linear rise from 0 to learning_rate")
    hold_steps: NonNegative = Field(0, description="steps at learning_rate between the warm-up and the fall")
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="last learning rate of linear and cosine, as a share of the peak"
    )


class LossScaleConfig(Section):
    """How losses are scaled with `precision: fp16`, so that small gradients don't vanish; powers of two.

    The scale multiplies the summed loss of a micro-batch, so it is smaller than a scale for mean losses by the number of
    tokens.
    """

    marks: ClassVar[tuple[Any, ...]] = (ReadOnlyWith("training_config.precision", "fp16"),)

    initial_power: Power = Field(8, description="the first scale is 2 to this power")
    growth_interval: Positive = Field(1000, description="steps without overflow after which the scale is doubled")
    min_power: Power = Field(-24, description="an overflow halves the scale, but not below 2 to this power")
    max_power: Power = Field(24, description="the scale is not doubled beyond 2 to this power")


class CompressionConfig(Section):
    """How gradients are compressed; what the codec loses of a gradient is added to the next one."""

    kind: Literal["none", "bf16", "int8", "top_k", "powersgd"] = Field(
        "none",
        description="none: values as they are; bf16: 2 bytes per value; int8: 1 byte per value and a scale per block; "
        "top_k: only the largest values; powersgd: two narrow factors of each matrix",
    )
    block_size: Size = Field(256, description="int8: values that share a scale")
    k: Annotated[float, Field(gt=0, le=1)] = Field(0.01, description="top_k: share of the values that is sent")
    rank: Size = Field(4, description="powersgd: columns of the factors")
    error_feedback: bool = Field(
        default=True,
        description="add what compression lost of a gradient to the next one; needs 4 bytes of memory per value",
    )


class CheckpointConfig(Section):
    """Checkpoints, from which a run can resume, and the weights with which training begins."""

    marks: ClassVar[tuple[Any, ...]] = (Bits.FREE,)

    interval: Positive | None = Field(
        100, description="steps between checkpoints; the last step always has one; null: no checkpoints at all"
    )
    keep: Positive = Field(3, description="number of newest checkpoints to keep; older ones are removed")
    keep_every: Positive | None = Field(
        None, description="also keep checkpoints whose step is a multiple of this; null: no others"
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="when one cannot be written, as on a full disk: end the run, or report it and continue"
    )
    initial_weights: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="weights to begin with: a safetensors file, or `hf:` and a folder of transformers, which also says the sizes; null: drawn from the seed",
    )


SAID_BY = {"transformer_config.num_blocks": "multihost_config.pipeline_parallel_config.num_blocks"}
"""Keys that take the value of another key, if only that one is written."""


class ConfigFile(Section):
    """The sections that every recipe's training file has, so that ttlaunch can plan and start any recipe."""

    noun: ClassVar[str] = "the training file"

    multihost_config: MultihostConfig = MultihostConfig()
    device_config: DeviceConfig = DeviceConfig()


class TrainingFile(ConfigFile):
    """The sections that recipes which train a model share; a recipe adds its own in a subclass."""

    training_config: TrainingConfig = TrainingConfig()
    data_config: DataConfig = DataConfig()
    transformer_config: TransformerConfig = TransformerConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    loss_scale_config: LossScaleConfig = LossScaleConfig()
    checkpoint_config: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _take_the_pipelines_blocks(self) -> Self:
        """Give the model as many blocks as the pipeline splits, if the file names their number only there."""
        pipeline, model = self.multihost_config.pipeline_parallel_config, self.transformer_config
        if pipeline is not None and pipeline.num_blocks is not None and "num_blocks" not in model.model_fields_set:
            # Assigned in place: pydantic ignores another object that a validator returns when a section is constructed.
            changed = model.model_copy(update={"num_blocks": pipeline.num_blocks})
            object.__setattr__(self, "transformer_config", changed)
        return self
