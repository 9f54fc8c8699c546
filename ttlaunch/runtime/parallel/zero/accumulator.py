"""Adds up gradients that arrive at any time: from several senders at once, in any order, perhaps twice or too late.

An owner of parameters needs it with a transport that repeats a request if the answer was lost, such as remote procedure calls. The
recipe `zero` does not use it: its messages arrive once, in order, from ranks that all take part in every step.

Shapes: those of the parameters.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor


class Receipt(StrEnum):
    """Whether a gradient that was sent was used, and if not why."""

    COUNTED = "counted"
    DUPLICATE = "duplicate"  # the same sender has already sent this parameter's gradient for this step
    LATE = "late"  # the sum of this step, or of a later one, has been taken
    UNKNOWN_SENDER = "unknown sender"
    UNKNOWN_PARAMETER = "unknown parameter"


@dataclass
class _Sum:
    """One parameter's gradients of one step.

    Attributes:
        senders: The places of the senders whose gradients have arrived.
        nodes: The sums over nodes of the tree, by the place of a node's first sender and its number of senders.
    """

    senders: set[int] = field(default_factory=set)
    nodes: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class GradientAccumulator:
    """Sums over senders, for each step and parameter; any number of threads may send at the same time.

    Whatever the order of arrival, gradients are added along one binary tree over the senders: two sums are added when
    both halves of a node have arrived. So the bits do not depend on the order. For n senders the sums take at most the
    memory of n gradients, and less if neighbours' gradients arrive one after the other.

    Attributes:
        receipts: How many gradients had each `Receipt`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, senders: Sequence[str]) -> None:
        """Expect a gradient of each parameter from each sender, in every step.

        Args:
            parameters: The parameters by name; only their shapes and types are read.
            senders: Their names; the order is that of the sums.

        Raises:
            ValueError: There is no sender, or two have the same name.
        """
        self._expected = {name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()}
        self._places = {name: place for place, name in enumerate(senders)}
        if not senders or len(self._places) != len(senders):
            raise ValueError(f"{len(senders)} senders have {len(self._places)} different names; expected at least one")
        self._sums: dict[tuple[int, str], _Sum] = {}
        self._taken: dict[str, int] = {}  # the newest step of each parameter whose sum was taken
        self._changed = threading.Condition()
        self.receipts: Counter[Receipt] = Counter()

    def add(self, gradient: Tensor, *, step: int, parameter: str, sender: str) -> Receipt:
        """Count a gradient, unless it was counted before, comes too late, or is not expected at all.

        Args:
            gradient: The gradient; copied, so that the sender may use its memory again.
            step: The step that it belongs to; gradients of several steps may arrive at the same time.
            parameter: The parameter's name.
            sender: The sender's name.

        Returns:
            Whether the gradient was counted, and if not why; then no sum has changed.

        Raises:
            ValueError: The gradient has another shape or type than the parameter.
        """
        refused = self._unknown(parameter, sender)
        if refused is None and (gradient.shape, gradient.dtype) != self._expected[parameter]:
            shape, dtype = self._expected[parameter]
            raise ValueError(
                f"a gradient of `{parameter}` is {gradient.dtype} {tuple(gradient.shape)}, expected {dtype} {tuple(shape)}"
            )
        own = gradient.detach().clone() if refused is None else gradient
        with self._changed:
            receipt = refused or self._count(own, step, parameter=parameter, place=self._places[sender])
            self.receipts[receipt] += 1
            if receipt is Receipt.COUNTED:
                self._changed.notify_all()
        return receipt

    def is_ready(self, *, step: int, parameter: str) -> bool:
        """Return whether the gradients of all senders have arrived, and the sum has not been taken yet."""
        with self._changed:
            return self._is_ready(step, parameter)

    def missing(self, *, step: int, parameter: str) -> list[str]:
        """Return the senders whose gradients are missing, in order; an empty list if the sum was taken."""
        with self._changed:
            if self._is_late(step, parameter):
                return []
            found = self._sums.get((step, parameter), _Sum()).senders
            return [name for name, place in self._places.items() if place not in found]

    def take_sum(self, *, step: int, parameter: str, timeout_s: float = 0.0) -> Tensor:
        """Return the sum over all senders, once. It belongs to the caller; further gradients of this step are late.

        Raises:
            TimeoutError: A gradient is missing after `timeout_s`; the message names the sender.
            ValueError: The sum of this step or of a later one was taken before.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_ready(step, parameter) or self._is_late(step, parameter), timeout=timeout_s
            )
            if self._is_late(step, parameter):
                raise ValueError(f"the sum of `{parameter}` of step {step} or of a later one has been taken")
            if not self._is_ready(step, parameter):
                missing = ", ".join(self.missing(step=step, parameter=parameter))
                raise TimeoutError(f"no gradient of `{parameter}` of step {step} from {missing}")
            found = self._sums.pop((step, parameter))
            self._taken[parameter] = step
            self._forget(parameter, until=step)
        ordered = [found.nodes[key] for key in sorted(found.nodes)]
        while len(ordered) > 1:
            ordered[-2].add_(ordered.pop())
        return ordered[0]

    def take_mean(self, *, step: int, parameter: str, timeout_s: float = 0.0) -> Tensor:
        """Return the sum over all senders divided by their number, once, as `take_sum` returns the sum."""
        return self.take_sum(step=step, parameter=parameter, timeout_s=timeout_s).div_(len(self._places))

    def drop(self, *, until: int) -> None:
        """Forget all steps up to `until`, such as those before a restart; their further gradients are late."""
        with self._changed:
            for parameter in self._expected:
                self._taken[parameter] = max(until, self._taken.get(parameter, until))
                self._forget(parameter, until=until)
            self._changed.notify_all()

    @property
    def held_bytes(self) -> int:
        """The size of all gradients and sums that are waiting."""
        with self._changed:
            return sum(node.nbytes for found in self._sums.values() for node in found.nodes.values())

    def _unknown(self, parameter: str, sender: str) -> Receipt | None:
        if sender not in self._places:
            return Receipt.UNKNOWN_SENDER
        return None if parameter in self._expected else Receipt.UNKNOWN_PARAMETER

    @torch.no_grad()
    def _count(self, gradient: Tensor, step: int, *, parameter: str, place: int) -> Receipt:
        if self._is_late(step, parameter):
            return Receipt.LATE
        found = self._sums.setdefault((step, parameter), _Sum())
        if place in found.senders:
            return Receipt.DUPLICATE
        found.senders.add(place)
        size = 1
        while (place ^ size, size) in found.nodes:
            sibling = found.nodes.pop((place ^ size, size))
            gradient = sibling.add_(gradient)  # a + b has the bits of b + a
            place, size = place & ~size, 2 * size
        found.nodes[place, size] = gradient
        return Receipt.COUNTED

    def _is_late(self, step: int, parameter: str) -> bool:
        return parameter in self._taken and step <= self._taken[parameter]

    def _is_ready(self, step: int, parameter: str) -> bool:
        found = self._sums.get((step, parameter))
        return found is not None and len(found.senders) == len(self._places)

    def _forget(self, parameter: str, *, until: int) -> None:
        for key in [key for key in self._sums if key[1] == parameter and key[0] <= until]:
            del self._sums[key]
