"""What workers from other machines and a run's coordinator send each other.

Python 3.9 and the standard library only, as every module of this package.
"""

from __future__ import annotations

from ttlaunch.records.parser import (
    BadRecord,
    Count,
    FilePath,
    Flag,
    Json,
    Number,
    Port,
    Rank,
    Seconds,
    Size,
    Step,
    Text,
    Word,
    load,
    parse,
    record,
)

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")


@record
class Fingerprint:
    """Everything on a machine that decides the bits of a step.

    Attributes:
        release: The SHA-256 of ttlaunch's own code.
        recipe: The SHA-256 of the recipe's files.
        config: The SHA-256 of the resolved configuration.
        corpus: The SHA-256 of the training text; empty if the recipe reads none.
        torch: The version of torch with its build.
        cpu_capability: The vector instructions that torch uses.
        threads: How many threads torch uses for one operation.
        device: What the rank computes on: `cpu`, or the name of its GPU.
    """

    release: Word
    recipe: Word
    config: Word
    corpus: Word
    torch: Word
    cpu_capability: Word
    threads: Count
    device: Word = "cpu"


@record
class TorchBuild:
    """What the torch of this machine's ranks says of itself; see `Fingerprint`."""

    torch: Word
    cpu_capability: Word
    threads: Count
    device: Word


@record
class Registration:
    """A worker asks to take part.

    Attributes:
        worker_id: The number that it had before, as `worker-0007`; None for a new one.
        ip_address, port: Where it listens for the other workers.
        have_step: The last step whose state it has; 0 if it has none.
        name: What its user calls it, for views.
        certificate_request: A request (PEM) for the certificate by which the other workers know it.
    """

    worker_id: Word | None = None
    ip_address: Word
    port: Port
    fingerprint: Fingerprint
    have_step: Step = 0
    name: Word = ""
    certificate_request: Text | None = None


@record
class Heartbeat:
    """A worker says how far it is, and asks for orders.

    Attributes:
        incarnation: The one that its registration returned.
        loss: The loss of `step`.
        rss: The resident memory of its process, in bytes.
        records: New lines of the rank's progress file.
        wait_s: How long the answer may wait for an order.
    """

    incarnation: Count
    epoch: Count = 0
    step: Step = 0
    phase: Word = ""
    micro_batches_done: Count = 0
    loss: Number | None = None
    tokens_per_s: Number | None = None
    rss: Size | None = None
    records: tuple[Text, ...] = ()
    wait_s: Seconds = 0.0


@record
class Invitation:
    """The owner of a run asks for a token by which one worker may register."""

    valid_s: Seconds


@record
class CoordinatorPlace:
    """The content of `contract.COORDINATOR_FILE`.

    Attributes:
        socket: The Unix socket for the user's own processes.
        url: What an invitation names; None if workers of other machines cannot join.
    """

    socket: FilePath
    url: Word | None = None


# What the coordinator answers


@record
class Authority:
    """The answer to `GET /authority`: the certificate of the run's authority, as PEM."""

    authority: Text


@record
class GivenLimits:
    """How far the workers of a run may come and go; see `ElasticLimits` of `planning/launch_plan.py`."""

    minimum: Count
    maximum: Count
    micro_batches: Count
    first: Count
    has_local_steps: Flag = False


@record
class RunDescription:
    """The answer to `GET /run`: what a worker must know of the run before it registers.

    Attributes:
        recipe: The name of the recipe.
        layout, role: The layout of its roles, and the role of every worker.
        config: The resolved training file; a worker's own text may lie elsewhere.
        url: What an invitation names.
    """

    run_id: Word
    recipe: Word
    layout: Word
    role: Word
    config: Text
    elastic: GivenLimits
    fingerprint: Fingerprint
    url: Word | None = None


@record
class Welcome:
    """The answer to a registration.

    Attributes:
        lease_s: How long the worker may hear nothing of the run before it ends.
        heartbeat_s: How often it reports at least.
        token: What it shows from now on.
        certificate: The one that it asked for.
    """

    worker_id: Word
    incarnation: Count
    rank: Rank | None = None
    run_id: Word
    lease_s: Seconds
    heartbeat_s: Seconds
    token: Word
    certificate: Text | None = None


@record
class GivenOrders:
    """The answer to a heartbeat; see `running/membership/members.py`."""

    epoch: Count
    order: Word
    messages: tuple[Json, ...] = ()


@record
class GivenDifference:
    """A field of the fingerprint in which a worker differs from the run, with the value of each."""

    field: Word
    run: Word
    worker: Word


@record
class Refusal:
    """Why a request was refused."""

    error: Text
    hints: tuple[Word, ...] = ()
    differences: tuple[GivenDifference, ...] = ()


@record
class GivenInvitation:
    """The answer to `POST /invitations`."""

    id: Word
    token: Word
    expires_in_s: Seconds
    url: Word | None = None


@record
class KnownInvitation:
    """An invitation in the answer to `GET /invitations`."""

    id: Word
    expires_in_s: Seconds
    used_by: Rank | None = None
    is_valid: Flag


@record
class Invitations:
    """The answer to `GET /invitations`."""

    invitations: tuple[KnownInvitation, ...]


@record
class RevokedInvitation:
    """The answer to `DELETE /invitations/ID`; `used_by` is the worker that had registered with it."""

    id: Word
    used_by: Rank | None = None


@record
class Leaving:
    """The answer to `DELETE /workers/ID`."""

    leaves_after_step: Step


@record
class ListedWorker:
    """A worker in the answer to `GET /workers`; see `Worker` of `running/membership/members.py`."""

    worker_id: Word
    name: Word = ""
    rank: Rank | None = None
    incarnation: Count = 0
    ip_address: Word = ""
    port: Port | None = None
    state: Word = ""
    step: Step | None = None
    loss: Number | None = None
    tokens_per_s: Number | None = None
    memory_bytes: Size | None = None
    last_progress_s: Seconds | None = None
    left: Word = ""
    fenced_messages: Count = 0


@record
class Workers:
    """The answer to `GET /workers`."""

    workers: tuple[ListedWorker, ...]


def read_body(cls: type[T], data: bytes) -> T | BadRecord | UnknownField:
    """Parse the body of a request. Unlike a record, it may have no field that its class does not know."""
    content = load(data)
    if isinstance(content, BadRecord):
        return content
    unknown = _unknown_field(cls, content, "")
    return parse(cls, content) if unknown is None else unknown


class UnknownField:
    """A field that a body must not have, and the fields that it may have at this place."""

    def __init__(self, path: str, name: str, known: frozenset[str]) -> None:
        self.path = path
        self.name = name
        self.known = known


def _unknown_field(cls: type, content: object, path: str) -> UnknownField | None:
    if not isinstance(content, dict):
        return None
    known = cls._fields  # type: ignore[attr-defined]
    for name, value in content.items():
        if name not in known:
            return UnknownField(path, name, known)
        inner = _unknown_field(Fingerprint, value, f"{name}.") if name == "fingerprint" else None
        if inner:
            return inner
    return None
