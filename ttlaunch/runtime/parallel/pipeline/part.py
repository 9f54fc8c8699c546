"""What one rank of a pipeline has: its chunks of the model, the tree of gradients of each, and the optimizer over them.

Shapes: N = values of the flat vectors of all the rank's parameters, C = values of one chunk, which are contiguous.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttlaunch.runtime.checkpoint.checkpoints import held_tensors
from ttlaunch.runtime.comm.collectives import chain_all_gather
from ttlaunch.runtime.comm.reduction import GradientTree, contiguous_blocks
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import MicroBatch
from ttlaunch.runtime.model.backward import run_backward
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.model.parts import cut_into_parts
from ttlaunch.runtime.parallel.gradients.sums import all_reduce_mean
from ttlaunch.runtime.parallel.pipeline.grid import PipelineGrid
from ttlaunch.runtime.parallel.pipeline.links import PipelineLinks
from ttlaunch.runtime.parallel.pipeline.schedules import Action, ScheduleName, order_of_passes
from ttlaunch.runtime.parallel.tensor.norms import squared_norms
from ttlaunch.runtime.parallel.tensor.share import share_of
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.training.optimizers import build_optimizer
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.spec.recipe.sections import TrainingFile

_TIED = 30_007


@dataclass(frozen=True)
class Chunk:
    """One contiguous part of the model on this rank.

    Attributes:
        part: The chunk's number, counted through the whole model.
        blocks: The blocks of the chunk.
        is_first: Whether it begins with the embedding, and so takes tokens.
        is_last: Whether it ends with the head, and so computes the loss.
        parameters: The places of its parameters among those of the rank.
        grads_C: The chunk's part of the flat gradients.
        sums: The sums of its gradients over micro-batches.
        unsummed: Tokens and loss of the micro-batch whose gradients wait in `grads_C` for those of its sibling.
    """

    part: int
    blocks: range
    is_first: bool
    is_last: bool
    parameters: range
    grads_C: Tensor
    sums: GradientTree
    unsummed: list[tuple[int, float]]


class PipelinePart:
    """A rank's part of the model, in chunks, with its optimizer.

    Attributes:
        grid: The rank's place.
        schedule: The schedule of its passes; it may change as long as the number of chunks does not.
        chunks: The chunks in the order of the model.
        model: The model of all chunks.
        share: The rank's share of its stage's matrices; None if it has whole matrices.
        optimizer: The optimizer of all chunks.
    """

    def __init__(self, cfg: TrainingFile, ctx: RankContext, grid: PipelineGrid, *, schedule: ScheduleName) -> None:
        """Build this rank's part of the model for a schedule, with parameters drawn from the seed."""
        self.grid, self.schedule = grid, schedule
        self._cfg, self._ctx = cfg, ctx
        pipeline = cfg.multihost_config.pipeline_parallel_config
        assert pipeline is not None  # noqa: S101 - the recipe's checks have passed
        count = num_chunks(cfg, schedule)
        self.share = share_of(ctx, grid.shares)
        self.model = build_model(
            cfg, ctx, stage=grid.stage, blocks_per_stage=pipeline.blocks, chunks_per_stage=count, share=self.share
        )
        self.optimizer = build_optimizer(cfg, self.model, total_steps=ctx.data(cfg).total_steps)
        if self.model.tied_gradient_VD is not None:
            ctx.traffic.note(tied_values=self.model.tied_gradient_VD.numel())
        self._block = contiguous_blocks(cfg.training_config.micro_batches, len(grid.replicas))[grid.replica]
        self.chunks = _chunks(ctx, self.model, cut_into_parts(pipeline.blocks, num_chunks=count), grid=grid)

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters and optimizer state by name; other ranks of its stage and replicas have the same."""
        return held_tensors(self.model, self.optimizer)

    def checkpoint(self, step: int) -> None:
        """Compare the replicas after a step and save those of the first pipeline, each if it is due."""
        self._ctx.compare(step, self.held_tensors)
        self._ctx.checkpoint(step, self.model, self.optimizer, owners=self.grid.first_pipeline)

    def order(self, micro_batches: int) -> list[Action]:
        """Return the order of the passes of a step, for this replica's number of micro-batches."""
        if not micro_batches:
            return []
        return order_of_passes(
            self.schedule,
            self.grid.stage,
            num_stages=len(self.grid.stages),
            num_micro_batches=micro_batches,
            num_chunks=len(self.chunks),
        )

    def links(self, order: Sequence[Action], batches: Sequence[MicroBatch]) -> PipelineLinks:
        """Begin the exchange of the messages that these passes over these micro-batches need."""
        width = self._cfg.transformer_config.embedding_dim
        shapes = [torch.Size((*x_BT.shape, width)) for _, x_BT, _ in batches]
        return PipelineLinks(
            self._ctx, self.grid, order, num_chunks=len(self.chunks), shapes=shapes, device=self._ctx.device
        )

    def run_backward(self, out: Tensor, gradient: Tensor | None) -> None:
        """Run the backward pass from what a chunk has returned, of which this is the gradient; None: 1."""
        run_backward(out, gradient)

    def add_gradients(self, chunk: Chunk, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients that the backward pass of one micro-batch has computed.

        For two siblings in the tree, the second backward pass adds its gradients to the first one's: the same addition,
        without four more passes over the memory.

        Args:
            chunk: The chunk that the backward pass went through.
            index: The micro-batch's index in the whole step.
            tokens: The number of tokens that it predicted.
            loss: The sum of their losses; 0 on a rank that does not compute it.
        """
        self.model.take_gradients()
        if index % 2 == 0 and index + 1 in self._block:
            chunk.unsummed.append((tokens, loss))
            return
        leaves = 1
        for tokens_before, loss_before in chunk.unsummed:
            index, tokens, loss, leaves = index - 1, tokens_before + tokens, loss_before + loss, 2
        chunk.unsummed.clear()
        chunk.sums.add(index, chunk.grads_C, tokens=tokens, loss=loss, leaves=leaves)
        chunk.grads_C.zero_()

    def mean_gradients(self) -> tuple[float, int]:
        """Leave the gradients of the mean loss over the micro-batches of all replicas in the model.

        Every rank of the pipelines must call, once a step, when its passes are done.

        Returns:
            Mean loss per token, which is valid only on the last stage; tokens of the whole step.

        Cost: with several replicas an `all_reduce_mean` of each chunk's gradients among them; with tied embeddings one
            message each way between first and last stage, of the matrix's bytes; else no message.
        Order: that of the tree over micro-batches, then one division, then the second use of a tied matrix: the bits of
            one process.
        """
        count, loss, tokens = self._cfg.training_config.micro_batches, 0.0, 0
        for chunk in self.chunks:
            if len(self.grid.replicas) == 1:
                loss, tokens = chunk.sums.mean(chunk.grads_C, micro_batches=count)
            else:
                among = self.grid.replicas
                loss, tokens = all_reduce_mean(self._ctx, chunk.sums, chunk.grads_C, among=among, micro_batches=count)
        self._share_tied_gradient()
        return loss, tokens

    def _share_tied_gradient(self) -> None:
        """Add the gradients of both uses of a shared matrix, on first and last stage alike; see `tied.py`."""
        mine_VD, ends = self.model.tied_gradient_VD, (self.grid.stages[0], self.grid.stages[-1])
        if mine_VD is None:
            return
        other = ends[1] if self.grid.rank == ends[0] else ends[0]
        theirs_VD = torch.empty_like(mine_VD)
        with operation(self._ctx, "tied_gradient"):
            arriving = self._ctx.irecv(theirs_VD, source=other, tag=_TIED)
            sending = self._ctx.isend(mine_VD, dest=other, tag=_TIED)
        arriving.wait()
        sending.wait()
        mine_VD.add_(theirs_VD)

    def squared_norms(self) -> list[float]:
        """Return the squared norm of the gradient of each parameter of the whole model, in the model's order, on every rank.

        Every rank of a replica must call, after `mean_gradients`.

        Cost: a `chain_all_gather` of two numbers (float64) for each parameter along the stages, and what
            `squared_norms` of `tensor/norms.py` costs among ranks that split a stage.
        Order: that of the model's parameters, whatever stage has them.
        """
        norms = squared_norms(self.optimizer, self.model, self.share)
        mine = [
            value
            for chunk in self.chunks
            for norm in norms[chunk.parameters.start : chunk.parameters.stop]
            for value in (float(chunk.part), norm)
        ]
        found = chain_all_gather(self._ctx, mine, among=self.grid.stages)
        by_part = sorted(zip(found[::2], found[1::2], strict=True), key=lambda pair: pair[0])
        return [norm for _, norm in by_part]


def num_chunks(cfg: TrainingFile, schedule: ScheduleName) -> int:
    """Return the number of chunks of a rank under a schedule."""
    pipeline = cfg.multihost_config.pipeline_parallel_config
    return pipeline.chunks_per_rank if pipeline is not None and schedule == "interleaved" else 1


def _chunks(ctx: RankContext, model: Model, parts: Sequence[range], *, grid: PipelineGrid) -> list[Chunk]:
    chunks = []
    own = range(grid.stage, len(parts), len(grid.stages))
    for part in own:
        is_first, is_last = part == 0, part == len(parts) - 1
        parameters, values = model.ranges_of_blocks(parts[part])
        grads_C = model.grads_N[values.start : values.stop]
        chunks.append(Chunk(part, parts[part], is_first, is_last, parameters, grads_C, ctx.gradient_tree(grads_C), []))
    return chunks
