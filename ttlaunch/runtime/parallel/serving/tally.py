"""What a rank of a serving run has computed, sent and waited for: the one source of `/metrics` and of `ttlaunch report`.

Every rank keeps its own numbers and writes them to its traffic file as facts, from which the recipe's formula and the report are
made. A beat, the message that passes through all ranks each second, brings them to the head, whose door shows them.

Shapes: n = ranks, F = 2 + n numbers of a rank: microseconds of computing and of messages, and bytes sent to each rank.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.serving.step_plan import StepPlan
from ttlaunch.serving import wire
from ttlaunch.spec.recipe.serving import told_numbers

_now = time.monotonic_ns


class Tally:
    """The numbers of one rank.

    Attributes:
        counts: What the formula of the traffic needs, by name: plans, rows, and so on.
        told_nF: At the head, the numbers of all ranks as of the last beat.
        facts_of_answers: At the head, what it knows of the texts that it has answered.
    """

    def __init__(self, ctx: RankContext) -> None:
        """Begin with zeros; what the rank writes of its traffic has the numbers from now on."""
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("plans", "rows", "wanted", "padded_rows", "padded_wanted", "beats", "ends"), 0)
        )
        self.facts_of_answers: Callable[[], Mapping[str, int]] = dict
        self._traffic, self._rank = ctx.traffic, ctx.rank
        self.told_nF = torch.zeros(ctx.world_size, told_numbers(ctx.world_size), dtype=torch.int64)
        self._computing_ns = self._sending_ns = self._waiting_ns = 0
        ctx.traffic.facts_now = self.facts

    def run(self, part: Callable[[StepPlan, Tensor], Tensor], plan: StepPlan, x: Tensor) -> Tensor:
        """Compute a plan with this rank's part; what the part waits for inside, the columns of others, counts as messages."""
        self.counts.update(plans=1, rows=plan.rows, wanted=plan.wanted)
        with self.computing():
            return part(plan, x)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count a block as computing, without the messages in it."""
        began, waited = _now(), self._traffic.waited_ns
        yield
        inside = self._traffic.waited_ns - waited
        self._computing_ns += _now() - began - inside
        self._sending_ns += inside

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count a block as the time of messages: it sends, or receives what is on its way already."""
        began = _now()
        yield
        self._sending_ns += _now() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a block as waiting for what other ranks have yet to compute."""
        began = _now()
        yield
        self._waiting_ns += _now() - began

    def own(self) -> Tensor:
        """Return this rank's numbers, shape (F,)."""
        sent = [self._traffic.sent_to.get(rank, 0) for rank in range(len(self.told_nF))]
        return torch.tensor([self._computing_ns // 1000, self._sending_ns // 1000, *sent])

    def enter_own(self) -> None:
        """Put this rank's numbers into `told_nF`."""
        self.told_nF[self._rank] = self.own()

    def facts(self) -> dict[str, int]:
        """Return what the rank writes beside its traffic."""
        times = {"computing": self._computing_ns, "sending": self._sending_ns, "waiting": self._waiting_ns}
        in_us = {f"{name}_us": value // 1000 for name, value in times.items()}
        return {**self.counts, **in_us, **self.facts_of_answers()}

    def write(self) -> None:
        """Write the rank's traffic with its facts, if that was not done lately."""
        self._traffic.write_if_due()

    def as_stats(self) -> dict[str, Any]:
        """Return, at the head, the numbers of all ranks as fields of `wire.Stats`."""
        self.enter_own()
        ranks = self.told_nF.tolist()
        return {
            "busy_seconds": tuple(row[0] / 1e6 for row in ranks),
            "sent_bytes": tuple(
                wire.SentBytes(source=source, target=target, count=count)
                for source, row in enumerate(ranks)
                for target, count in enumerate(row[2:])
                if count
            ),
        }
