"""The records that a rank writes while it works: its progress, line by line.

Each record is a class whose annotations are the kinds of `parser.py`. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import math

from ttlaunch import contract
from ttlaunch.records.audits import AUDITS, AuditClaim, AuditVote, Digests
from ttlaunch.records.endings import RankError
from ttlaunch.records.members import MemberReport
from ttlaunch.records.parser import (
    LATEST,
    BadRecord,
    Count,
    Number,
    Pid,
    Size,
    Step,
    Text,
    Time,
    Value,
    Word,
    load,
    parse,
    record,
    shown,
)
from ttlaunch.records.updates import NotFinite, Update

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any, TypeVar, Union

    T = TypeVar("T")

# The records of a rank's progress; each is a line of `records/rank-N.progress.jsonl`, with the fields in this order.


@record
class Started:
    """The shim has started the rank's process."""

    time: Time
    pid: Pid
    shim_pid: Pid | None = None
    host: Word = ""


@record
class Starting:
    """The rank has begun a stage of its start-up, such as the import of torch."""

    time: Time
    stage: Text


@record
class Ready:
    """The rank has joined the others, and the runtime calls the role's function."""

    time: Time
    total_steps: Step | None = None


@record
class StepDone:
    """An optimizer step is done; `values` are the numbers that the recipe reports about it, in the recipe's order."""

    time: Time
    step: Step
    values: dict[str, Number]

    @property
    def loss(self) -> float | None:
        """The training loss, which may be NaN or infinite; None if the rank does not know it."""
        return self.values.get("loss")

    @property
    def grad_norm(self) -> float | None:
        """The gradient's norm; None for a rank that does not update weights."""
        return self.values.get("grad_norm")

    @property
    def counted(self) -> tuple[str, int]:
        """What the rank counts, tokens or samples, and how many the step had; 0 tokens for a rank that counts neither."""
        name = next((name for name in contract.COUNTED if name in self.values), contract.COUNTED[0])
        number = self.values.get(name, 0)
        return name, int(number) if math.isfinite(number) else 0

    @property
    def own_counted(self) -> tuple[str, int] | None:
        """Tokens or samples that a member of an elastic run has differentiated itself since its last step, as a pair of name and number; None for other ranks."""
        own = {name: value for name in contract.COUNTED if (value := self.values.get(contract.OWN + name)) is not None}
        return StepDone(time=self.time, step=self.step, values=own).counted if own else None

    @property
    def arrived_from(self) -> int | None:
        """The rank that sent the gradient of an asynchronous step; None if the step used several gradients."""
        source = self.values.get(contract.ARRIVED_FROM)
        return source if type(source) is int else None


@record
class Validation:
    """A validation after a step; `values` has its mean loss, its tokens or samples, and perplexity or accuracy."""

    time: Time
    step: Step
    values: dict[str, Number]

    @property
    def loss(self) -> float:
        return self.values["loss"]

    @property
    def perplexity(self) -> float | None:
        return self.values.get("perplexity")

    @property
    def accuracy(self) -> float | None:
        return self.values.get("accuracy")


@record
class LayerNorms:
    """The norm of the gradient of each layer that the rank updates."""

    time: Time
    step: Step
    norms: dict[str, Number]


@record
class LostCheckpoint:
    """The rank could not write its shard of a checkpoint, and training continues."""

    time: Time
    step: Step
    reason: Text


@record
class Stopping:
    """The rank has noticed the order to stop, is committed to this step, and begins no later one without a decision."""

    time: Time
    step: Step


@record
class Note:
    """A message for the user."""

    time: Time
    text: Text


@record
class Parameters:
    """The SHA-256 of name, shape, dtype and bytes of each parameter that the rank holds."""

    time: Time
    digests: dict[str, Word]


@record
class Result:
    """The recipe's own results for the summary, by name."""

    time: Time
    values: dict[str, Value]


@record
class Done:
    """The role's function returned."""

    time: Time


@record
class TrainsAlone:
    """A rank of a script has run a backward pass, and its process has joined no group of torch."""

    time: Time


@record
class JoinedGroup:
    """A rank of a script that trained alone has joined a group of torch."""

    time: Time


@record
class Printed:
    """A line of a script's output that has numbers with names, see `records/printed.py`; `step` is the one that the line names."""

    time: Time
    step: Step | None = None
    values: dict[str, Number]


@record
class Usage:
    """What the processes of a script's rank use of their host: the rank's own, its children, their children and so on.

    Attributes:
        cpu_percent: The processor time since the last such record, or the rank's start, in percent of one core.
        memory_bytes: The sum of their resident memory; memory that several of them share counts in each.
        count: How many processes they are.
        gpu_percent: How busy their devices are on average, also with work of others; None if there are none or the driver does not say.
        gpu_memory_bytes: How much memory of these devices is in use, likewise.
    """

    time: Time
    cpu_percent: Count
    memory_bytes: Size
    count: Count
    gpu_percent: Count | None = None
    gpu_memory_bytes: Size | None = None


@record
class OtherProgress:
    """A record of a kind that a recipe defines, or that a later version of ttlaunch writes."""

    kind: Word
    time: Time
    step: Step | None = None
    values: dict[str, Value]


if TYPE_CHECKING:
    Progress = Union[  # noqa: UP007 - Python 3.9
        Started,
        Starting,
        Ready,
        StepDone,
        Validation,
        Update,
        LayerNorms,
        NotFinite,
        AuditClaim,
        AuditVote,
        LostCheckpoint,
        Stopping,
        Note,
        Parameters,
        Digests,
        TrainsAlone,
        JoinedGroup,
        Printed,
        Usage,
        Result,
        Done,
        MemberReport,
    ]
    AnyProgress = Union[Progress, OtherProgress]  # noqa: UP007 - likewise
else:
    Progress = AnyProgress = object

_PROGRESS = {
    contract.KIND_STARTED: Started,
    contract.KIND_STARTING: Starting,
    contract.KIND_READY: Ready,
    contract.KIND_STEP: StepDone,
    contract.KIND_VALIDATION: Validation,
    contract.KIND_UPDATE: Update,
    contract.KIND_LAYER_NORMS: LayerNorms,
    contract.KIND_NOT_FINITE: NotFinite,
    **AUDITS,
    contract.KIND_LOST_CHECKPOINT: LostCheckpoint,
    contract.KIND_STOPPING: Stopping,
    contract.KIND_NOTE: Note,
    contract.KIND_PARAMETERS: Parameters,
    contract.KIND_DIGESTS: Digests,
    contract.KIND_TRAINS_ALONE: TrainsAlone,
    contract.KIND_JOINED_GROUP: JoinedGroup,
    contract.KIND_PRINTED: Printed,
    contract.KIND_USAGE: Usage,
    contract.KIND_RESULT: Result,
    contract.KIND_DONE: Done,
    contract.KIND_MEMBER: MemberReport,
}
_KIND_OF = {cls: kind for kind, cls in _PROGRESS.items()}
_OF_LINE = frozenset({"kind", "time", "step"})


def kind_of(progress: AnyProgress) -> str:
    """Return the kind of a progress record, as its line names it."""
    return progress.kind if isinstance(progress, OtherProgress) else _KIND_OF[type(progress)]


def measured_values(progress: AnyProgress) -> dict[str, object]:
    """Return the fields of a progress record besides its kind, time and step, in the order of its line."""
    if isinstance(progress, (StepDone, Validation, Printed, OtherProgress)):
        return dict(progress.values)
    values = {name: value for name, value in vars(progress).items() if name not in _OF_LINE}
    if isinstance(progress, Usage):
        return {name: value for name, value in values.items() if value is not None}
    return values


def step_of(progress: AnyProgress) -> int | None:
    """Return the step of a progress record; None for a record without a step."""
    return getattr(progress, "step", None)


def moved_back(record: T, seconds: float) -> T:
    """Subtract seconds from a record's time, to correct for a host's clock; a record without a time is not changed.

    The result is limited to the times that a record may have.
    """
    known = vars(record)
    times = {name: known[name] for name in ("time", "seen", "left") if known.get(name) is not None}
    if isinstance(known.get("error"), RankError):
        return type(record)(**{**known, "error": moved_back(known["error"], seconds)})
    if not times:
        return record
    moved = {name: min(max(0.0, value - seconds), LATEST) for name, value in times.items()}
    return type(record)(**{**known, **moved})


def read_progress(line: bytes) -> AnyProgress | BadRecord:
    """Parse a line of a rank's progress."""
    content = load(line)
    if isinstance(content, BadRecord):
        return content
    if not isinstance(content, dict):
        return BadRecord(f"it is {shown(content)}, expected an object")
    kind = content.get("kind")
    cls = _PROGRESS.get(kind) if isinstance(kind, str) else None
    if cls in (StepDone, Validation):
        content = _with_values(content)
    elif cls is None:
        cls, content = OtherProgress, {**_with_values(content), "kind": kind}
    found: AnyProgress | BadRecord = parse(cls, content)
    if isinstance(found, Validation) and "loss" not in found.values:
        return BadRecord("`loss` is missing")
    return found


def _with_values(content: dict[str, Any]) -> dict[str, Any]:
    """Move the numbers of a line, which are beside its time and step, into an object of their own."""
    values = {name: value for name, value in content.items() if name not in _OF_LINE}
    return {**{name: content[name] for name in ("time", "step") if name in content}, "values": values}
