"""Whether a serving run gives the bits of training: each rank probes its part, and the head hears what all have found."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.serving.forward import CachedPart
from ttlaunch.runtime.serving.probe import probe, probe_whole
from ttlaunch.runtime.serving.rules import EXACT, FAST, Padding
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile

Exactness = Literal["auto", "on", "off"]
"""Whether logits get the bits of training: where possible, or else refuse; `off` computes less, with other bits."""

_FINDINGS, _LEAST_ROWS = 4, 5
"""Tags of the messages with the number of a rank's findings, and with the fewest rows of its products."""


def agree_on_padding(ctx: RankContext, sharing: Sequence[Rank], exact: Exactness) -> Padding:
    """Return how products and attention are padded: alike on ranks that gather columns of them, whose CPUs may differ.

    Args:
        ctx: Every one of `sharing` calls this once, before it computes anything.
        sharing: The ranks that share matrices, the head first.
        exact: Whether bits have to be those of training.

    Cost: two numbers between the head and each other rank.
    Order: the head receives in the order of ranks; the largest number is the same in any order.
    """
    if exact == "off" or len(sharing) == 1 or _of_device(ctx):
        return FAST if exact == "off" or _of_device(ctx) else EXACT
    head, *others = sharing
    rows = torch.tensor([EXACT.least_rows])
    if ctx.rank != head:
        ctx.send(rows, dest=head, tag=_LEAST_ROWS)
        ctx.recv(rows, source=head, tag=_LEAST_ROWS)
        return replace(EXACT, rows=int(rows))
    theirs = torch.zeros(1, dtype=torch.int64)
    for rank in others:
        ctx.recv(theirs, source=rank, tag=_LEAST_ROWS)
        rows = torch.maximum(rows, theirs)
    for rank in others:
        ctx.send(rows, dest=rank, tag=_LEAST_ROWS)
    return replace(EXACT, rows=int(rows))


def why_not_exact(
    cfg: TrainingFile,
    ctx: RankContext,
    model: Model,
    *,
    part: CachedPart,
    exact: Exactness,
    training_rows: int | None = None,
) -> list[str]:
    """Probe this rank's part; at the head, return why the bits differ from those of training.

    Args:
        cfg: The model's configuration.
        ctx: Any rank of a serving run; all call this once, before the first plan.
        model: The part that this rank has.
        part: The same with its cache, which is empty.
        exact: `on`: raise where a rule does not hold.
        training_rows: Tokens of a micro-batch in training; None: those of one sequence.

    Returns:
        Sentences; empty if the bits are those of training, and at every rank but the head.

    Cost: up to two seconds, on a GPU a forward pass of a micro-batch, and one number from every rank to the head.
    Order: the head receives in the order of ranks.

    Raises:
        ValueError: A rule does not hold, and `exact` is `on`.
    """
    if exact == "off":
        return ["it was asked for with `--exact off`"] if ctx.rank == ctx.sole("head") else []
    found = _of_device(ctx) or probe(cfg, model, part.products)
    if ctx.device.type != "cpu" and not found:
        found = probe_whole(cfg, model, part, training_rows=training_rows or cfg.transformer_config.max_sequence_length)
    head, others = ctx.sole("head"), (*ctx.ranks("stage"), *ctx.ranks("share"))
    if ctx.rank != head:
        ctx.send(torch.tensor([len(found)]), dest=head, tag=_FINDINGS)
    else:
        count = torch.zeros(1, dtype=torch.int64)
        for rank in others:
            ctx.recv(count, source=rank, tag=_FINDINGS)
            if count:
                found.append(f"rank {rank} found rules that do not hold for its part; its log names them")
    if found and exact == "on":
        raise ValueError(f"logits with the bits of training cannot be had: {'; '.join(found)}")
    if ctx.rank == head:
        return found
    for one in found:
        ctx.note(f"not exact: {one}")
    return []


def _of_device(ctx: RankContext) -> list[str]:
    """Why nobody knows whether this rank gives the bits of training, whatever a probe finds."""
    is_alone = not (ctx.ranks("share") or ctx.ranks("stage"))
    return (
        []
        if ctx.device.type == "cpu" or is_alone
        else ["equal bits of a model on several ranks are known for CPUs only"]
    )
