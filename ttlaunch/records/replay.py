"""What the process of a replay is asked for, and what it writes of the step that it shows: `replay.json`.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Count, Flag, Number, Rank, Step, Text, Word, record

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

ORDER_FILE = "replay-order.json"
RESULT_FILE = "replay.json"
"""What a replay shows, or the first piece of it; the others are `replay-1.json` and so on."""
MOST_IN_PIECE = 2_500
"""The most tensors of each kind in a piece, which then has a few MB."""
MOST_PIECES = 400
_LISTS = ("activations", "micro_gradients", "gradients", "tensors")


@record
class ReplayOrder:
    """What a replay is to do.

    Attributes:
        step: The last step that is made.
        shown: Whether this step is described; else only digests are recorded.
        digests: Whether the digests of all tensors are recorded after each step, and not only where the run has recorded them.
        file: The file of the line before which a debugger opens, as `co_filename` has it; None: none opens.
        line: That line.
        rank: The rank that the debugger is for.
    """

    step: Step
    shown: Flag
    digests: Flag
    file: Word | None = None
    line: Count | None = None
    rank: Rank | None = None


@record
class TensorFacts:
    """A tensor, described: its bits as a SHA-256, the norm and bounds of its finite values, and how they are distributed.

    Attributes:
        histogram: How many values lie in each of equal parts of the range from the lowest to the highest.
    """

    shape: tuple[Count, ...]
    dtype: Word
    sha256: Word
    norm: Number
    lowest: Number
    highest: Number
    nans: Count
    infs: Count
    histogram: tuple[Count, ...]


@record
class NamedTensor:
    """A tensor of the model or the optimizer."""

    name: Word
    facts: TensorFacts


@record
class PassTensor:
    """A tensor of one pass: what a layer made of a micro-batch, or the gradient of a parameter from this micro-batch alone."""

    micro_batch: Count
    name: Word
    facts: TensorFacts


@record
class ShownBatch:
    """A micro-batch that a rank has read.

    Attributes:
        texts: The text of each sequence; for images, their labels.
    """

    index: Count
    inputs_sha256: Word
    targets_sha256: Word
    shape: tuple[Count, ...]
    texts: tuple[Text, ...]


@record
class FirstNotFinite:
    """The first layer of a micro-batch's passes that made a value that is NaN or infinite.

    Attributes:
        layer: Its name in the model; `loss` for the loss itself.
        is_backward: Whether its backward pass made it, of finite activations; else its forward pass.
    """

    micro_batch: Count
    layer: Word
    is_backward: Flag
    nans: Count
    infs: Count


@record
class ShownRank:
    """What a rank had in the step that was shown.

    Attributes:
        is_complete: Whether the rank has come to the end of the step.
        gradients: Those of the mean loss, clipped, as the update used them; empty for a rank that makes no update.
        tensors: Parameters, and the state of the optimizer, after the update.
        not_finite: The first layer that made a value that is no number, in the first such micro-batch of the rank; None if none did.
    """

    rank: Rank
    role: Word
    is_complete: Flag
    batches: tuple[ShownBatch, ...]
    activations: tuple[PassTensor, ...]
    micro_gradients: tuple[PassTensor, ...]
    gradients: tuple[NamedTensor, ...]
    tensors: tuple[NamedTensor, ...]
    not_finite: FirstNotFinite | None = None


@record
class ReplayEnd:
    """All ranks in the step that was shown."""

    step: Step
    ranks: tuple[ShownRank, ...]


def file_of_piece(number: int) -> str:
    """Name the file of a piece, from 0."""
    return RESULT_FILE if number == 0 else f"replay-{number}.json"


def cut(end: ReplayEnd) -> Iterator[ReplayEnd]:
    """Cut what was shown into pieces that no reader refuses: of each rank a few thousand tensors at a time."""
    for one in end.ranks:
        lists = {name: getattr(one, name) for name in _LISTS}
        longest = max(map(len, lists.values()))
        for start in range(0, max(1, longest), MOST_IN_PIECE):
            part = {name: values[start : start + MOST_IN_PIECE] for name, values in lists.items()}
            if start:
                part["batches"] = ()
            yield ReplayEnd(step=end.step, ranks=(ShownRank(**{**vars(one), **part}),))


def join(pieces: Iterable[ReplayEnd]) -> ReplayEnd | None:
    """Join the pieces of `cut`; None without any."""
    found: dict[int, ShownRank] = {}
    step = None
    for piece in pieces:
        step = piece.step
        for one in piece.ranks:
            before = found.get(one.rank)
            known = {} if before is None else {name: getattr(before, name) + getattr(one, name) for name in _LISTS}
            batches = one.batches if before is None else before.batches
            found[one.rank] = ShownRank(**{**vars(one), **known, "batches": batches})
    return None if step is None else ReplayEnd(step=step, ranks=tuple(found.values()))


def first_not_finite(ranks: Sequence[ShownRank]) -> tuple[ShownRank, FirstNotFinite] | None:
    """Find the rank and the layer that first made a value that is NaN or infinite, in the first micro-batch that has one.

    Stages of a pipeline share a micro-batch: forward passes go from the first rank to the last, backward passes the other way.
    """
    found = [(rank, one) for rank in ranks if (one := rank.not_finite) is not None]
    return min(
        found,
        key=lambda pair: (
            pair[1].micro_batch,
            pair[1].is_backward,
            -pair[0].rank if pair[1].is_backward else pair[0].rank,
        ),
        default=None,
    )


def as_json(value: object) -> Any:
    """Convert a record of this module back to the JSON from which it was read."""
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    if isinstance(
        value, (ReplayOrder, TensorFacts, NamedTensor, PassTensor, ShownBatch, FirstNotFinite, ShownRank, ReplayEnd)
    ):
        return {name: as_json(one) for name, one in vars(value).items()}
    return value
