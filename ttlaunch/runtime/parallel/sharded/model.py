"""The model under torch's FSDP2: each block is a unit whose parameters are split by rows; embedding and head are one more.

FSDP2 gathers all rows of a unit before it computes and frees them afterwards. A rank keeps its own rows, in `Shards`.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = width of the residual stream.
Source: Y. Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; what is sharded
    is what S. Rajbhandari et al. shard in "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
    2020.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.dropout import Masks
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.model.recompute import recomputed
from ttlaunch.runtime.parallel.sharded.shards import Shards, padded_values
from ttlaunch.runtime.telemetry.memory import PARAMETERS, tensors_of_model
from ttlaunch.runtime.telemetry.traffic_counter import register_owner
from ttlaunch.runtime.training.rank_model import introduce
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ShardedModel(Model):
    """The whole model; only units that compute have all their weights, and of the other units a rank has its rows.

    With `precision: bf16` or `fp16`, weights are gathered in this precision and a unit makes all its computations in it. In other
    recipes, autocast chooses the precision of each operation. A rank's own rows, and the sums of gradients, are float32.
    """

    def __init__(self, cfg: TrainingFile, *, vocabulary: int, keeps_weights: bool) -> None:
        blocks = range(cfg.transformer_config.num_blocks)
        super().__init__(cfg, vocabulary=vocabulary, blocks=blocks, has_embedding=True, has_head=True)
        self._keeps_weights = keeps_weights
        self._units: list[Any] = [*self.blocks.values(), self]
        if cfg.training_config.activation_checkpointing:
            for block in self.blocks.values():
                block.forward = partial(_keep_input, block.forward)  # FSDP gathers the block's parameters around this

    def deal(self, among: Sequence[Rank], *, replicas: int, ctx: RankContext) -> None:
        """Keep only this rank's rows of every parameter, and count all collectives in its traffic counter."""
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  only ranks that share a model need it
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

        from ttlaunch.runtime.parallel.sharded.collectives import Ring, count_collectives  # noqa: PLC0415

        size = len(among) // replicas
        grid = (replicas, size) if replicas > 1 else (size,)
        mesh = init_device_mesh(ctx.device.type, grid, mesh_dim_names=("replica", "shard")[-len(grid) :])
        dtype = _DTYPES.get(self._cfg.training_config.precision)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for unit in self._units:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False if self._keeps_weights else None)
            unit.set_gradient_divide_factor(
                1.0
            )  # gradients are of summed losses; the division by the tokens comes last
            unit.set_force_sum_reduction_for_comms(True)
        replica, place = divmod(among.index(ctx.rank), size)
        shards = Ring(ctx.traffic, rank=ctx.rank, among=among[replica * size : (replica + 1) * size])
        copies = Ring(ctx.traffic, rank=ctx.rank, among=among[place::size]) if replicas > 1 else None
        count_collectives(self._units, shards=shards, replicas=copies)
        register_owner(ctx, self, _held_tensors)  # in place of `tensors_of_model`, which sees only the rows

    def synchronises(self, *, is_last: bool) -> None:
        """Set whether the next backward pass is the step's last: only then gradients are reduced over the ranks.

        Until then, whole gradients add up on this rank; with `keeps_weights`, gathered weights also stay until then.
        """
        self._units[-1].set_requires_gradient_sync(is_last)
        self._units[-1].set_reshard_after_backward(is_last or not self._keeps_weights)

    def free(self) -> None:
        """Free the weights that forward passes without a backward pass have gathered."""
        for unit in self._units:
            unit.reshard()

    def _run_block(self, block: nn.Module, x_BTD: Tensor, masks: Masks | None) -> Tensor:
        out_BTD: Tensor = block(x_BTD, masks)
        return out_BTD

    def _computing(self) -> AbstractContextManager[object]:
        return nullcontext()


def shard_model(
    cfg: TrainingFile, ctx: RankContext, *, among: Sequence[Rank], replicas: int, keeps_weights: bool
) -> tuple[ShardedModel, Shards]:
    """Build the model and distribute the rows of its parameters among the ranks.

    Args:
        cfg: The training configuration: sizes, seed, precision, and whether blocks recompute.
        ctx: The context of this rank; the `process_group` of the ranks must be entered.
        among: The ranks, replica by replica.
        replicas: The number of replicas; the ranks of a replica together have all parameters once.
        keeps_weights: Whether weights that a forward pass has gathered stay until the backward pass is over.

    Returns:
        The model, for its passes; the rows of this rank, for everything else.

    Cost: no message except to make torch's groups. Each rank initialises all weights once, then keeps its rows.
    """
    model = ShardedModel(cfg, vocabulary=ctx.data(cfg).vocabulary, keeps_weights=keeps_weights).to(ctx.device)
    size = len(among) // replicas
    inside = list(chain.from_iterable(block.parameters() for block in model.blocks.values()))
    known = {id(parameter) for parameter in inside}
    ends = [parameter for parameter in model.parameters() if id(parameter) not in known]
    values = padded_values(inside, parts=size), padded_values(ends, parts=size)
    ctx.traffic.note(values_of_blocks=values[0], values_of_ends=values[1])
    introduce(model, ctx, values=sum(values))
    with ctx.announced("import"):
        model.deal(among, replicas=replicas, ctx=ctx)
    replica, place = divmod(among.index(ctx.rank), size)
    return model, Shards(model, peers=among[replica * size : (replica + 1) * size], place=place)


def _held_tensors(model: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's rows, their gradients, and the tensors into which FSDP gathers, which are empty between passes."""
    yield from tensors_of_model(model)
    for unit in model._units:  # noqa: SLF001  of this module
        group = unit._get_fsdp_state()._fsdp_param_group  # noqa: SLF001  torch has no public access to gathered tensors
        for parameter in group.fsdp_params if group is not None else ():
            gathered: Tensor | None = getattr(parameter, "_unsharded_param", None)  # none before the first pass
            if gathered is not None:
                yield PARAMETERS, gathered


def _keep_input(forward: Callable[[Tensor, Masks | None], Tensor], x_BTD: Tensor, masks: Masks | None) -> Tensor:
    return recomputed(lambda x: forward(x, masks), x_BTD) if x_BTD.requires_grad else forward(x_BTD, masks)
