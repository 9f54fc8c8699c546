"""What one pipeline stage sends and receives during its passes, and when it waits for these messages.

A stage posts each receive one pass before the pass that needs it, and does not wait for a send at once. So neighbours with
consistent orders of passes never wait for each other in a circle, even if sends are synchronous. Few buffers are needed: besides
the micro-batches in flight, a stage has room for one incoming message of each kind, and for at most two outgoing gradients for
each stage.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = embedding_dim.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.parallel.pipeline.grid import PipelineGrid
from ttlaunch.runtime.parallel.pipeline.schedules import Action
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

ACTIVATIONS, GRADIENTS = 0, 1
"""Tags: the two directions of a link."""

_Pass = tuple[int, int]
"""Micro-batch and chunk."""


class PipelineLinks:
    """The messages of one stage for the passes of one step or validation.

    Cost: one message of `4 * B * T * D` bytes (float32) for every forward pass except of the model's last part, and for
        every backward pass except of its first part.
    Order: between two stages the messages of each kind follow the order of the passes, which both ends know; nothing is
        added up.
    """

    def __init__(
        self,
        ctx: Communicator,
        grid: PipelineGrid,
        order: Sequence[Action],
        *,
        num_chunks: int,
        shapes: Sequence[torch.Size],
        device: torch.device,
    ) -> None:
        """Post the first receives.

        Args:
            ctx: Every rank of the replica makes one, with the same micro-batches and chunks.
            grid: This rank's place.
            order: The passes of this rank; only forward passes for a validation.
            num_chunks: The number of chunks of a stage.
            shapes: (B, T, D) of each micro-batch.
            device: The device of activations.
        """
        self._communicator = ctx
        self._stages, self._stage, self._last_chunk = grid.stages, grid.stage, num_chunks - 1
        self._shapes, self._device = shapes, device
        self._trains = any(action.kind == "B" for action in order)
        self._handed: dict[tuple[str, _Pass], Tensor] = {}  # between neighbouring parts on this rank
        self._unread: dict[_Pass, tuple[Pending, Tensor]] = {}  # activations whose gradient has not arrived
        self._sends: deque[tuple[Pending, Tensor]] = deque()
        self._inputs = _Arrivals(self, order, "F")
        self._gradients = _Arrivals(self, order, "B")

    def receive_activations(self, action: Action) -> Tensor:
        """Return the output of the previous part, shape (B, T, D), a leaf; call for the forward passes in their order.

        Raises:
            ValueError: The pass is not the next one in the order.

        Cost: one message of `4 * B * T * D` bytes, or none where the previous part is on this rank.
        """
        return self._inputs.take(action).requires_grad_(self._trains)

    def send_activations(self, action: Action, out_BTD: Tensor) -> None:
        """Send the output of a forward pass to the next part.

        Args:
            action: The pass; call for the passes in their order.
            out_BTD: The output, float32, contiguous; it must not change until its gradient has arrived.

        Cost: one message of `4 * B * T * D` bytes, or none where the next part is on this rank.
        """
        dest, chunk = self.after(action.chunk)
        if dest == self._communicator.rank:
            self._handed["F", (action.micro_batch, chunk)] = out_BTD.detach()
            return
        with operation(self._communicator, "activations"):
            sent = self._communicator.isend(out_BTD.detach(), dest=dest, tag=ACTIVATIONS), out_BTD
        # The gradient that comes back shows that this message was read, so no wait is needed before that.
        if self._trains:
            self._unread[action.micro_batch, action.chunk] = sent
        else:
            self._keep(sent)

    def receive_gradients(self, action: Action) -> Tensor:
        """Return the gradient of a forward pass's output, shape (B, T, D), from the next part; call in the order of the passes.

        Raises:
            ValueError: The pass is not the next one in the order.

        Cost: one message of `4 * B * T * D` bytes, or none where the next part is on this rank.
        """
        grad_BTD = self._gradients.take(action)
        sent = self._unread.pop((action.micro_batch, action.chunk), None)
        if sent is not None:
            sent[0].wait()  # does not block: the gradient shows that the activations have arrived
        return grad_BTD

    def send_gradients(self, action: Action, grad_BTD: Tensor) -> None:
        """Send the gradient of a forward pass's input to the previous part.

        Args:
            action: The pass; call for the passes in their order.
            grad_BTD: The gradient, float32, contiguous; it must not change until `finish`.

        Cost: one message of `4 * B * T * D` bytes, or none where the previous part is on this rank.
        """
        dest, chunk = self.before(action.chunk)
        if dest == self._communicator.rank:
            self._handed["B", (action.micro_batch, chunk)] = grad_BTD
            return
        with operation(self._communicator, "activation_gradients"):
            self._keep((self._communicator.isend(grad_BTD, dest=dest, tag=GRADIENTS), grad_BTD))

    def finish(self) -> None:
        """Wait until all sends are complete."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def before(self, chunk: int) -> tuple[Rank, int]:
        """Return the rank that has the part before a chunk of this stage, and that part's chunk number there."""
        return self._stages[self._stage - 1], chunk - (self._stage == 0)

    def after(self, chunk: int) -> tuple[Rank, int]:
        """Return the rank that has the part after a chunk of this stage, and that part's chunk number there."""
        is_last = self._stage == len(self._stages) - 1
        return self._stages[0 if is_last else self._stage + 1], chunk + is_last

    def source(self, action: Action) -> Rank | None:
        """Return the rank that computes the input of a pass; None if no rank does."""
        source, chunk = self.before(action.chunk) if action.kind == "F" else self.after(action.chunk)
        return source if 0 <= chunk <= self._last_chunk else None

    def post(self, action: Action) -> tuple[Tensor, Pending] | None:
        """Make a buffer for the input of a pass, and begin to receive into it; None if this rank itself computes that input.

        Cost: one message of `4 * B * T * D` bytes.
        """
        source = self.source(action)
        if source is None or source == self._communicator.rank:
            return None
        box_BTD = torch.empty(self._shapes[action.micro_batch], device=self._device)
        name, tag = ("activations", ACTIVATIONS) if action.kind == "F" else ("activation_gradients", GRADIENTS)
        with operation(self._communicator, name):
            return box_BTD, self._communicator.irecv(box_BTD, source=source, tag=tag)

    def take_handed(self, action: Action) -> Tensor:
        """Return the input of a pass that another chunk on this rank has computed."""
        return self._handed.pop((action.kind, (action.micro_batch, action.chunk)))

    def _keep(self, sent: tuple[Pending, Tensor]) -> None:
        """Wait for a send only after several later ones, which still limits the number of buffers in use."""
        self._sends.append(sent)
        if len(self._sends) > 2 * len(self._stages):
            self._sends.popleft()[0].wait()


class _Arrivals:
    """Messages of one kind, in the order of the passes that need them; the next one is always being received."""

    def __init__(self, links: PipelineLinks, order: Sequence[Action], kind: str) -> None:
        self._links = links
        self._expected = deque(action for action in order if action.kind == kind and links.source(action) is not None)
        self._posted = links.post(self._expected[0]) if self._expected else None

    def take(self, action: Action) -> Tensor:
        """Wait for the message that `action` needs, and begin the next receive."""
        expected, posted = self._expected.popleft(), self._posted
        if expected != action:
            raise ValueError(f"pass {action} receives, but {expected} is next in the order")
        if posted is None:
            return self._links.take_handed(action)
        box_BTD, pending = posted
        pending.wait()
        self._posted = self._links.post(self._expected[0]) if self._expected else None
        return box_BTD
