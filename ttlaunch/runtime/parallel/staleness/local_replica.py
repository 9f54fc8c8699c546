"""A worker's replica of the model, which the worker updates alone and averages with the other replicas every few steps.

Shapes: N = values of all parameters in one flat vector. W = workers, S = bytes of the weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ttlaunch.runtime.comm.collectives import all_gather, all_reduce
from ttlaunch.runtime.comm.reduction import contiguous_blocks, mean_per_token
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.elastic.state_transfer import ReplicaState
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.compression.exchange import CompressedExchange
from ttlaunch.runtime.parallel.compression.saved import OwedState
from ttlaunch.runtime.parallel.compression.sums import CompressedSum
from ttlaunch.runtime.parallel.gradients.exchange import GradientExchange
from ttlaunch.runtime.parallel.staleness.local_members import LocalMembers
from ttlaunch.runtime.parallel.staleness.recorded_workers import LocalState, RecordedWorkers, block_gradient
from ttlaunch.runtime.telemetry.memory import BUFFERS
from ttlaunch.runtime.telemetry.traffic_counter import operation, register_owner
from ttlaunch.runtime.training.optimizers import build_optimizer, global_norm
from ttlaunch.runtime.training.passes import differentiate
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.runtime.training.validation import validation_losses
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import CompressionConfig, TrainingFile


class Average(NamedTuple):
    """What an average says about the steps since the last one.

    Attributes:
        loss: Mean loss per token, of all workers.
        tokens: Their tokens.
        is_given: Whether others made this average, in an elastic run whose members changed, and gave what they agreed on then: the
            agreed weights and every `keep_shared`.
    """

    loss: float
    tokens: int
    is_given: bool = False


class LocalReplica:
    """Weights and optimizer of one worker, and the weights that all workers last agreed on.

    The state of the optimizer stays with its worker and is never sent. Between two averages replicas differ; what
    is validated, reported and exported are the agreed weights.

    With SGD a step is linear in the gradient, also with momentum and weight decay: the average of the weights after one
    step is one step with the average gradient. So with SGD and an average after every step the workers average
    gradients, in the order and with the norm of `data_parallel`, and get its bits, which are those of one process. AdamW
    divides by a root of the gradient's square; there, an average after every step is another algorithm.

    With a codec, a worker encodes the difference of its weights from the agreed weights, and adds what the codec loses
    to its next difference. All workers decode the same payloads, so all get the same average. Weights are never rounded.
    Source: D. Basu, D. Data, C. Karakus, S. Diggavi, "Qsparse-local-SGD: Distributed SGD with Quantization,
        Sparsification, and Local Computations", NeurIPS 2019.

    In an elastic run a worker that comes begins with the agreed weights of the last average, and with an optimizer that knows
    no step. It makes no local step before the second one of the epoch, and has then made none that an average could count.
    Steps that a worker has made since the last average are lost with it. Workers always average weights there.
    When such a run is repeated in one process, this object makes the local steps of all workers; see `RecordedWorkers`.

    Attributes:
        model, optimizer: This worker's model and optimizer.
        agreed_N: The weights that all workers last agreed on, shape `(N,)`.
        is_agreed: Whether the model's weights are the agreed weights, without a local step since.
    """

    def __init__(
        self, cfg: TrainingFile, ctx: RankContext, *, among: Sequence[Rank], every: int, compression: CompressionConfig
    ) -> None:
        """Build a model, equal on all workers, and an optimizer.

        Args:
            cfg: The run's configuration.
            ctx: The context of this rank.
            among: The workers, in the order of their blocks of micro-batches; in an elastic run the members of each epoch.
            every: The number of steps from one average to the next.
            compression: How differences or gradients are compressed; a sole worker sends nothing, and loses nothing.
        """
        self._cfg, self._ctx, self._fixed = cfg, ctx, among
        self._members, self._every = self._make_members(every), every
        self.model = build_model(cfg, ctx)
        self.optimizer = build_optimizer(cfg, self.model, total_steps=ctx.data(cfg).total_steps)
        self.agreed_N = self.model.weights_N.clone()
        self.is_agreed = True
        self._tree = ctx.gradient_tree(self.model.weights_N)
        self._window = torch.zeros(2, dtype=torch.float64)  # tokens and summed loss since the last average
        self._own_steps = 0  # since then
        self._averaged = torch.zeros(2, dtype=torch.float64)  # mean loss and tokens of the last average
        self._shared: dict[str, Tensor] = {}
        register_owner(ctx, self, LocalReplica.held_tensors)
        self._last = 0.0, 0
        self._copied: Callable[[], object] = _nothing
        self._exchange: GradientExchange | CompressedExchange | None = None
        self._sum: CompressedSum | None = None
        self._owed = OwedState({})
        self._recorded: RecordedWorkers | None = None
        is_lossy = compression.kind != "none" and len(among) > 1
        if self._members is None and not ctx.epochs and every == 1 and cfg.training_config.optimizer == "sgd":
            self._exchange = self._gradient_exchange(compression) if is_lossy else self._exact_exchange()
        elif is_lossy:
            self._sum = CompressedSum(self.model, cfg=compression, ctx=ctx, among=among)
            self._owed = OwedState({f"{self._place}of{len(among)}": self._sum.codec})

    def _make_members(self, every: int) -> LocalMembers | None:
        if self._ctx.elastic is None:
            return None
        return LocalMembers(
            self._ctx.elastic,
            every=every,
            total_steps=self._ctx.data(self._cfg).total_steps,
            micro_batches=self._cfg.training_config.micro_batches,
        )

    @property
    def _among(self) -> Sequence[Rank]:
        """The workers: in an elastic run the members of the present epoch."""
        return self._fixed if self._members is None else self._ctx.ranks(self._ctx.role)

    @property
    def _place(self) -> int:
        return self._among.index(self._ctx.rank)

    def _exact_exchange(self) -> GradientExchange:
        return GradientExchange(
            self.model.parameters(),
            ctx=self._ctx,
            among=self._among,
            micro_batches=self._cfg.training_config.micro_batches,
            bucket_megabytes=self._cfg.multihost_config.bucket_megabytes,
        )

    def _gradient_exchange(self, compression: CompressionConfig) -> CompressedExchange:
        count = self._cfg.training_config.micro_batches
        exchange = CompressedExchange(
            self.model, cfg=compression, ctx=self._ctx, among=self._among, micro_batches=count
        )
        self._owed = exchange.saved_with(self.optimizer).owed
        return exchange

    def keep_shared(self, kind: str) -> Tensor:
        """Return zeros, shape `(N,)`, as a further state that checkpoints save once for all workers; call before `restore`."""
        self._shared[kind] = torch.zeros_like(self.agreed_N)
        return self._shared[kind]

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that all workers have equal, for the report of memory; see `telemetry/memory.py`."""
        yield from ((BUFFERS, tensor) for tensor in (self.agreed_N, *self._shared.values()))

    def restore(self) -> None:
        """Continue from the run's checkpoint, with this worker's own weights and state, or begin with the configured weights.

        A worker that joins an elastic run begins with the agreed weights, and so does one whose state the checkpoint lacks, because it
        is that of another number of workers.
        """
        own_N = self.model.weights_N.clone()
        if self._members is not None:
            shared = [self.agreed_N, *self._shared.values(), self._averaged]
            self._members.share(
                ReplicaState(self, self, self._ctx.early_stop, only=shared), own_steps=lambda: self._own_steps
            )
            agreed = _AgreedState(self)
            self._ctx.save_if_abandoned(agreed, agreed, newest=self._members.last_average)
        self._ctx.restore(self, self)
        if torch.equal(self.model.weights_N, own_N):  # no checkpoint had any of its own
            self.model.weights_N.copy_(self.agreed_N)
        self.is_agreed = torch.equal(self.model.weights_N, self.agreed_N)
        self._own_steps = 0 if self.is_agreed else self._ctx.steps_done % self._every
        if self._ctx.epochs:
            first = LocalState(self.model, self.optimizer, self._window)
            self._recorded = RecordedWorkers(self._cfg, self._ctx, first)

    def step(self, step: int) -> dict[str, float]:
        """Take a step with this worker's gradient; with SGD and an average after every step, with the mean of all workers'.

        Returns:
            What this worker reports of it: gradient norm and learning rate. Nothing in the first step of an epoch of an elastic
            run, if this worker has come with it.

        Raises:
            LeftError: This worker takes part in an elastic run no longer.
        """
        if self._members is not None:
            self._members.await_turn(step)
            if not self._members.block(step):
                self.optimizer.squared_norms()  # which reports of this step may ask for: there is no gradient
                return {}
        if self._recorded is not None:
            self.is_agreed = False
            return self._recorded.step(step, self.agreed_N)
        loss, tokens = self._own_gradient(step) if self._exchange is None else self._mean_gradient(self._exchange, step)
        norm = global_norm(self.optimizer.squared_norms())
        rate = self.optimizer.step(step, norm=norm)
        self._last = loss, tokens
        self._window += torch.tensor([tokens, loss * tokens], dtype=torch.float64)
        self.is_agreed = self._exchange is not None
        self._own_steps += 1
        return {"grad_norm": norm, "learning_rate": rate}

    @torch.no_grad()
    def average(self, step: int) -> Average:
        """Overwrite the model's weights with the average of all workers' weights.

        A worker's factor is its share of the tokens since the last average.

        Every worker must call, after the same step.

        Raises:
            LeftError: This worker takes part in an elastic run no longer.

        Cost: `2 * (W - 1)` messages each way, `2 * (W - 1) / W * S` bytes (float32), and 16 bytes to every other
            worker; with a codec `W - 1` messages of a payload each way. With SGD and an average after every step none,
            because `step` has averaged the gradients.
        Order: the tree over the workers' places, as `all_reduce`: the same bits on every run with this W. With a codec,
            the order of the workers.
        Source: S. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; there all workers have the
            same factor.
        """
        if self._exchange is not None:  # every worker has made the same step
            self._window.zero_()
            return Average(*self._last)
        if self._recorded is not None:
            found = Average(*self._recorded.average(step, self.model.weights_N))
        elif self._members is None:
            found = self._average(self.model.weights_N)
        else:
            # What was interrupted is made anew from the same weights, so the sum needs its own memory.
            made = self._members.together(step, partial(self._average, torch.empty_like(self.model.weights_N)))
            if made is None:  # `agreed_N` is what the others have agreed on
                self.model.weights_N.copy_(self.agreed_N)
            loss, tokens = self._averaged.tolist()
            found = made or Average(loss, int(tokens), is_given=True)
        self._averaged.copy_(torch.tensor(found[:2], dtype=torch.float64))
        self._window.zero_()
        self._own_steps = 0
        return found

    def _average(self, sum_N: Tensor) -> Average:
        """Make an average, whose sum may be added up in the memory of the weights themselves."""
        counts = torch.zeros(2 * len(self._among), dtype=torch.float64)
        counts[2 * self._place : 2 * self._place + 2] = self._window
        with operation(self._ctx, "counts"):
            all_gather(self._ctx, counts, among=self._among)
        tokens, loss = counts.view(-1, 2).sum(dim=0).tolist()
        share = self._window[0].item() / tokens if tokens else 1 / len(self._among)
        if self._sum is not None:
            self._add_up_differences(self._sum, share)
        else:
            torch.mul(self.model.weights_N, share, out=sum_N)
            with operation(self._ctx, "weights"):
                all_reduce(self._ctx, sum_N, among=self._among)
            self.model.weights_N.copy_(sum_N)
        return Average(mean_per_token(loss, int(tokens)), int(tokens))

    def _add_up_differences(self, total: CompressedSum, share: float) -> None:
        """Add to the agreed weights the mean of the workers' differences from them, as the codecs transmit it."""
        moved_N = (self.model.weights_N - self.agreed_N).mul_(share)
        self._owed.wait_before_encode()
        for message in total.begin(moved_N, name="differences"):
            message.wait()
        total.finish(moved_N)
        torch.add(self.agreed_N, moved_N, out=self.model.weights_N)

    @torch.no_grad()
    def agree(self) -> None:
        """Take the model's weights, which are now equal on all workers, as the agreed weights."""
        self.agreed_N.copy_(self.model.weights_N)
        self.is_agreed = True
        if self._recorded is not None:
            self._recorded.agree(self.agreed_N)

    @torch.no_grad()
    def validation_losses(self) -> Tensor:
        """Evaluate this worker's share of the validation with the agreed weights, as `validation_losses` does."""
        own_N = None if self.is_agreed else self.model.weights_N.clone()
        self.model.weights_N.copy_(self.agreed_N)
        losses_V = validation_losses(self._cfg, self._ctx, self.model, among=self._among)
        if own_N is not None:
            self.model.weights_N.copy_(own_N)
        return losses_V

    def agreed_model(self) -> Model:
        """Return the model with the agreed weights; call when training is over."""
        self._copied()  # a checkpoint may still read the worker's own weights
        with torch.no_grad():
            self.model.weights_N.copy_(self.agreed_N)
        return self.model

    def _own_gradient(self, step: int) -> tuple[float, int]:
        """Leave the gradient of the mean loss of this worker's block in the model, added along the tree over the block."""
        each = iter if self._members is None else self._members.each
        block = self._block(step)
        return block_gradient(self._cfg, self._ctx, self.model, tree=self._tree, step=step, block=block, each=each)

    def _block(self, step: int) -> range:
        if self._members is not None:
            return self._members.block(step)
        return contiguous_blocks(self._cfg.training_config.micro_batches, len(self._fixed))[self._place]

    def _mean_gradient(self, exchange: GradientExchange | CompressedExchange, step: int) -> tuple[float, int]:
        """Leave the gradient of the mean loss of all workers' blocks in the model, equal on every worker."""
        for index, x_BT, y_BT in micro_batches(self._cfg, self._ctx, step, among=self._among):
            expect, masks = partial(exchange.expect, index), self.model.masks(step, index)
            loss, tokens = differentiate(self.model, x_BT, y_BT, masks=masks, before_backward=expect)
            exchange.accumulate(index, tokens=tokens, loss=loss)
        return exchange.finish()

    def replicated(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that all workers have equal: agreed weights and outer state, and at an agreement the model's weights.

        If workers average gradients, the optimizer's state, too.
        """
        yield from self._views(self.agreed_N)
        for kind, flat_N in self._shared.items():
            yield from ((f"{kind}.{name}", view) for name, view in self._views(flat_N))
        if self.is_agreed:
            yield from ((f"weights.{name}", view) for name, view in self._views(self.model.weights_N))
        if self._exchange is not None:
            yield from self.optimizer.named_state()

    # What checkpoints contain: the agreed weights under the parameters' names, which the first worker writes, and each
    # worker's replica under names that end with the worker's place.

    splits: Mapping[str, Any] = {}

    @property
    def copies(self) -> frozenset[str]:
        """The names that the first worker writes for all: agreed weights and outer state."""
        return frozenset(name for name, _ in self.model.named_parameters()) if self._place else frozenset()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._views(self.agreed_N)

    def names_of_whole(self) -> frozenset[str]:
        return self.model.names_of_whole()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        for place, (model, optimizer, window) in self._states():
            yield from ((f"weights.{name}~{place}", view) for name, view in self._views(model.weights_N))
            yield from ((f"{name}~{place}", tensor) for name, tensor in optimizer.named_state())
            yield f"window~{place}", window
        yield from self._owed.named_state()
        yield from self.named_shared_state()

    def named_shared_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what `keep_shared` has returned, under the names that checkpoints have for it."""
        for kind, flat_N in self._shared.items():
            yield from ((f"{kind}.{name}", view) for name, view in self._views(flat_N))

    def _states(self) -> Iterator[tuple[str, LocalState]]:
        """Yield the states of which checkpoints have a copy each, with the place that their names end with."""
        if self._recorded is not None:
            yield from self._recorded.states()
        else:
            yield f"{self._place}of{len(self._among)}", LocalState(self.model, self.optimizer, self._window)

    def names_that_may_be_missing(self) -> frozenset[str]:
        """Return the names of this worker's own state, which a checkpoint of another number of workers lacks.

        Only elastic runs, also repeated ones, have those: other runs keep their number of workers when they are resumed.
        """
        if self._members is None and not self._ctx.epochs:
            return frozenset()
        own = f"~{self._place}of{len(self._among)}"
        return frozenset(name for name, _ in self.named_state() if name.endswith(own))

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        self._copied = ready
        if self._recorded is not None:
            self._recorded.wait_before_update(ready)
        self.optimizer.wait_before_update(ready)
        self._owed.wait_before_update(ready)

    def scaler_state(self) -> None:
        """Return None: recipes with local steps refuse fp16, because every worker would choose another scale."""

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        del state

    def _views(self, flat_N: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the part of a flat vector that belongs to each parameter, with the parameter's name."""
        for name, parameter in self.model.named_parameters():
            start = parameter.data.storage_offset()
            yield name, flat_N[start : start + parameter.numel()].view(parameter.shape)


class _AgreedState:
    """What a worker of an elastic run saves when the run has lost its coordinator: what all workers had equal after the last average.

    Workers are at different local steps then, and no checkpoint could have the own state of all of them.
    """

    splits: Mapping[str, Any] = {}
    copies: frozenset[str] = frozenset()

    def __init__(self, replica: LocalReplica) -> None:
        self._replica = replica

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._replica.named_parameters()

    def names_of_whole(self) -> frozenset[str]:
        return self._replica.names_of_whole()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        return self._replica.named_shared_state()

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        """Need not wait: no update follows."""

    def scaler_state(self) -> None:
        """Return None, as the replica does."""

    def restore_scaler(self, state: Mapping[str, Any] | None) -> None:
        del state


def _nothing() -> None:
    """Do nothing, as long as no checkpoint has begun."""
