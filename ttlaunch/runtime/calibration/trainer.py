"""Measure what messages cost between two ranks, then run all ranks of another plan in turns in every rank.

    rank 0 ←─ 1 kB … 8 MB ─→ rank 1          then in each rank, at the same time: rank 0, rank 1, … of the plan

There are as many copies as the plan has ranks that compute at the same time (`concurrency.py`), because ranks that share a machine slow each
other down: they share its memory. What a copy measures of each rank is therefore what the rank will take beside the others. A plan of one rank
has several copies that rehearse one after the other: two processes that do the same differ by up to a tenth for as long as they live, because
of where in the machine's memory their pages are.

    ttlaunch plan data_parallel --predict --step-time
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttlaunch.records.calibration import LinkSample, MeasuredLink, rehearsal_file
from ttlaunch.runtime.calibration.fit import fit_link, quantile
from ttlaunch.runtime.calibration.recipe import Config
from ttlaunch.runtime.calibration.rehearsal import MessageCosts, rehearse
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.world import Rank, World, read_world

_SEVERAL = 8
_MESSAGES = ((1_000, 1), (32_000, 1), (512_000, 1), (8_000_000, 1), (1_000, _SEVERAL))
"""The bytes of messages, and how many begin one after the other: the last ones say what one costs right after another."""
_FIELDS = 5  # of a sample
_FEWEST, _MOST = 5, 200
_TENSORS, _CACHES = 16, 64_000_000
"""How many tensors are sent in turns, and how many bytes they have at most."""
_LINK_S = 0.25
"""Time for the messages of each size."""
_MOST_LOOKS = 50
"""How often a rank looks for a message before it waits for it all the same."""
_LEAST_PART = 0.5
"""With less than half of its part of the time, a copy that rehearses after others makes too few steps to say anything."""
_NO_LINK = MessageCosts(0.0, 0.0, 1e12)
_BLOCKS, _WIDEST, _ROWS = 3, 256, 32
"""`Layers` has three blocks, at most 256 wide, for 32 rows: at most 0.8 MB of weights and as much of gradients, and about a millisecond."""


def copy(cfg: Config, ctx: RankContext) -> None:
    """Measure messages with the next copy, and rehearse; if the plan has one rank, rehearse after the copy before this one."""
    order, link = cfg.calibration_config, None
    world, folder = read_world(Path(order.plan)), Path(order.folder)
    if world.size == 1:
        found = in_turn(ctx, partial(rehearse, world, _NO_LINK, folder=folder), seconds=order.seconds)
    else:
        link = _measure_link(ctx, width=_width_of(world))
        costs = MessageCosts(link.latency_s, link.again_s, link.bytes_per_s)
        found = rehearse(world, costs, seconds=order.seconds, folder=folder, copy=ctx.rank, copies=ctx.world_size)
    found = found or {"ranks": [{"role": role, "steps": []} for role in world.roles], "findings": [], "is_spare": True}
    content = {**found, "link": None if link is None else _as_json(link)}
    (folder / rehearsal_file(ctx.rank)).write_text(json.dumps(content) + "\n", encoding="utf-8")


def in_turn(
    ctx: RankContext,
    rehearsing: Callable[..., dict[str, Any]],
    *,
    seconds: float,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any] | None:
    """Let one copy after the other rehearse a single rank: beside each other they would slow each other down, as no run does.

    Args:
        ctx: The context of this copy.
        rehearsing: Is called with `seconds` and `longest_s`, and returns what it has found.
        seconds: The time for all copies together, of which each has an equal part; as much again for steps that take long.
        now: The clock, in seconds.

    Returns:
        What it has found; None if the copies before have left it less than `_LEAST_PART` of its part, or if it has found something wrong
        that the first copy has not, such as too few steps in what time was left.
    """
    left = torch.tensor([seconds], dtype=torch.float64)
    if ctx.rank:
        ctx.recv(left, source=Rank(ctx.rank - 1))
    began, found = now(), None
    if ctx.rank == 0 or left.item() >= _LEAST_PART * seconds / ctx.world_size:
        part = left.item() / (ctx.world_size - ctx.rank)
        found = rehearsing(seconds=part, longest_s=left.item() + seconds)
        found = None if ctx.rank and found["findings"] else found
    left -= now() - began
    if ctx.rank + 1 < ctx.world_size:
        ctx.send(left, dest=Rank(ctx.rank + 1))
    return found


def _width_of(world: World) -> int:
    """Return how wide the layers are that ranks compute between messages: as those of the plan, the less of which the caches hold."""
    section = world.config.get("transformer_config")  # a recipe of one's own may mean something else by it
    width = section.get("embedding_dim") if isinstance(section, Mapping) else None
    return min(width, _WIDEST) if isinstance(width, int) and width > 0 else _WIDEST


def _measure_link(ctx: RankContext, *, width: int) -> MeasuredLink:
    """Exchange messages of each size between ranks 0 and 1, and tell all ranks what one costs."""
    torch.set_num_threads(1)  # others would count as if they carried messages
    layers = Layers(width)
    samples = [_measure(ctx, size, count=count, layers=layers) for size, count in _MESSAGES if ctx.rank in {0, 1}]
    found = torch.zeros((len(_MESSAGES), _FIELDS), dtype=torch.float64)
    if ctx.rank == 0:
        found = torch.tensor([list(vars(one).values()) for one in samples], dtype=torch.float64)
        for peer in range(1, ctx.world_size):
            ctx.send(found, dest=Rank(peer))
    else:
        ctx.recv(found, source=Rank(0))
    rows = found.tolist()
    *known, several = (
        LinkSample(size=int(size), repeats=int(repeats), median_s=median, low_s=low, high_s=high)
        for size, repeats, median, low, high in rows
    )
    latency_s, bytes_per_s = fit_link([(one.size, one.median_s) for one in known])
    again_s = (several.median_s - known[0].median_s) / (_SEVERAL - 1)
    return MeasuredLink(
        latency_s=latency_s,
        again_s=max(0.0, min(latency_s, again_s)),
        bytes_per_s=bytes_per_s,
        samples=tuple(known),
    )


def _measure(ctx: RankContext, size: int, *, count: int, layers: "Layers") -> LinkSample:
    """Exchange messages until the time for this size is over; rank 0 decides, and says so in the first value.

    They are other tensors each time, and each rank computes something before: neither a message nor the code that sends it is in the
    caches of a core that has just run a layer. Otherwise a small message would cost a part of what it costs in a step.

    Args:
        ctx: The context of one of two ranks.
        size: The bytes of a message.
        count: How many begin one after the other.
        layers: What is computed.

    Returns:
        What all of them took together.
    """
    sets = max(1, min(_TENSORS, _CACHES // size))
    messages = [[torch.zeros(size // 4) for _ in range(2 * count)] for _ in range(sets)]
    seconds: list[float] = []
    began = time.perf_counter()
    while True:
        sent, received = messages[len(seconds) % sets][:count], messages[len(seconds) % sets][count:]
        is_enough = len(seconds) >= _FEWEST and time.perf_counter() - began > _LINK_S
        sent[0][0] = float(ctx.rank == 0 and (is_enough or len(seconds) >= _MOST))
        layers.compute()
        seconds.append(exchange(ctx, sent, received, between=layers.compute))
        if sent[0][0] or received[0][0]:
            break
    new = min(sets, len(seconds) - _FEWEST)  # the first message with each tensor sets something up
    known = sorted(seconds[max(1, new) :])
    return LinkSample(
        size=size,
        repeats=len(known),
        median_s=statistics.median(known),
        low_s=quantile(known, 0.1),
        high_s=quantile(known, 0.9),
    )


class Layers:
    """Something to compute through the code that a step runs; of the largest width, weights and gradients are more than a second cache holds."""

    def __init__(self, width: int) -> None:
        blocks = [(torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(_BLOCKS)]
        self._model = torch.nn.Sequential(*(layer for block in blocks for layer in block))
        self._input = torch.ones(_ROWS, width)

    def compute(self) -> None:
        """Compute the layers and their gradients."""
        self._model(self._input).sum().backward()


def exchange(
    ctx: RankContext, sent: Sequence[Tensor], received: Sequence[Tensor], *, between: Callable[[], object]
) -> float:
    """Send messages and receive as many; return the processor time of those in one direction, at both ends.

    No rank waits for the other: it does something else until the messages are there, which does not count, and neither does a look that
    finds nothing. So the time is the same while other programs have the cores. All other threads of the process count.

    Args:
        ctx: The context of one of two ranks.
        sent: The messages for the other one.
        received: Get the messages of the other one.
        between: What to do until the messages are there.
    """
    peer, else_s, began = Rank(1 - ctx.rank), 0.0, time.process_time()
    transfers = [ctx.irecv(one, source=peer) for one in received] + [ctx.isend(one, dest=peer) for one in sent]
    left = time.thread_time()
    between()
    else_s += time.thread_time() - left
    for transfer in transfers:
        for _ in range(_MOST_LOOKS):
            left = time.thread_time()
            if transfer.test():
                break
            between()
            else_s += time.thread_time() - left
        transfer.wait()
    return time.process_time() - began - else_s


def _as_json(link: MeasuredLink) -> dict[str, object]:
    return {**vars(link), "samples": [vars(one) for one in link.samples]}
