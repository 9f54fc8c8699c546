"""What `ttlaunch simulate --virtual` asks its process for, and what that process has found: `virtual-order.json`, `virtual.json`.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Amount, Count, Flag, Rank, Size, Step, Text, Word, record

VIRTUAL_ORDER_FILE = "virtual-order.json"
VIRTUAL_FILE = "virtual.json"
VIRTUAL_ERROR_FILE = "virtual-error.txt"


@record
class VirtualRoute:
    """The directed links that a message crosses between two places: 2 k for link k from its first end, 2 k + 1 from its second."""

    source: Count
    dest: Count
    links: tuple[Count, ...]


@record
class VirtualNetwork:
    """Links that ranks share; see `Network` of `planning/routes.py`.

    Attributes:
        places: The place of each rank.
        bytes_per_s, latencies_s: What each directed link costs.
    """

    places: tuple[Count, ...]
    bytes_per_s: tuple[Amount, ...]
    latencies_s: tuple[Amount, ...]
    routes: tuple[VirtualRoute, ...]


@record
class Span:
    """Ranks from the first to the last one."""

    first: Rank
    last: Rank


@record
class VirtualFault:
    """What is to happen to ranks; see `FateOrder` of `runtime/comm/virtual_fates.py`.

    Attributes:
        ranks: All ranks that it hits.
        step: 0 for a fault at a time.
    """

    deed: Word
    ranks: tuple[Span, ...]
    step: Step
    at_s: Amount


_NO_SPANS: tuple[Span, ...] = ()
_NO_FAULTS: tuple[VirtualFault, ...] = ()


@record
class VirtualOrder:
    """What to simulate.

    Attributes:
        steps: How many steps of the training.
        warm_up: How many of them, the first ones, do not count in the times of steps.
        gflops: How many 10^9 floating-point operations a rank computes in a second; ignored with `compute_s`.
        compute_s: How long the forward and backward pass of one micro-batch through the whole model takes; 0: not given.
        latency_s, bytes_per_s: What a message costs.
        slow: Ranks that take longer, and how many times as long.
        slow_links: Ranks whose port is slower, and how many times.
        fold: Whether ranks that do the same run once; those that share links never do.
        network: The links that they share; None: each has a port of its own.
        jitter, seed: In each step each rank computes faster or slower by up to this part, drawn with the seed.
        faults: What happens to ranks.
        times_micro_batch: Whether to say how long a micro-batch takes.
    """

    steps: Count
    gflops: Amount
    compute_s: Amount
    latency_s: Amount
    bytes_per_s: Amount
    slow: dict[str, Amount]
    slow_links: dict[str, Amount]
    fold: Flag
    network: VirtualNetwork | None = None
    jitter: Amount = 0.0
    seed: Count = 0
    warm_up: Count = 0
    faults: tuple[VirtualFault, ...] = _NO_FAULTS
    times_micro_batch: Flag = False


@record
class VirtualClass:
    """How each of some ranks that do the same has spent the time of its steps, in seconds of all of its steps together.

    Attributes:
        members: The ranks.
        steps: How many steps each has done after those that do not count; 0 for ranks that count none.
        all_s: The time in these steps, or if it counts none its whole time.
        each_s: The time of each of these steps.
        facts: Its numbers for the formula of its traffic.
        end: How it ended: "done", "ended" by a fault, "stopped" for good, or "waits" for ever.
        last_step: The last step that it reported.
        last_s: What its clock showed at last.
    """

    members: tuple[Span, ...]
    steps: Count
    all_s: Amount
    computing_s: Amount
    exposed_s: Amount
    waiting_s: Amount
    each_s: tuple[Amount, ...]
    facts: dict[str, Size]
    end: Word
    last_step: Count
    last_s: Amount


@record
class VirtualEdge:
    """What each rank of a class has sent to each of so many ranks of another one, which are given by their places in `classes`.

    Attributes:
        peers: To how many ranks.
        messages, bytes: To each of them.
        step_bytes: Those of the bytes that were within steps.
    """

    source: Count
    dest: Count
    peers: Count
    messages: Count
    bytes: Size
    step_bytes: Size


@record
class VirtualMade:
    """A fault that has happened: which one of the order, when, after which step of its ranks, and to which ranks that had not ended."""

    index: Count
    at_s: Amount
    step: Count
    ranks: tuple[Span, ...]


@record
class VirtualError:
    """An exception that ended a rank."""

    rank: Rank
    at_s: Amount
    type: Word
    module: Word
    message: Text
    file: Word | None
    line: Count | None


@record
class VirtualEnd:
    """The result.

    Attributes:
        classes: Each rank is in one of them.
        findings: Mistakes in the messages, in words.
        flops_per_s: How many floating-point operations a rank that is not slow computes in a second.
        not_folded: Why every rank has times of its own although equal ones were to run once, as a clause; None if that is not so.
        made: The faults that have happened, in order.
        errors: Of ranks that raised one.
        repeats: The ranks that have times of their own and repeat what the code of a few of them does.
        micro_batch_s: How long the forward and backward pass of a micro-batch takes on a rank that is not slow; 0: not asked for.
    """

    classes: tuple[VirtualClass, ...]
    edges: tuple[VirtualEdge, ...]
    findings: tuple[Text, ...]
    flops_per_s: Amount
    not_folded: Text | None
    made: tuple[VirtualMade, ...]
    errors: tuple[VirtualError, ...]
    repeats: tuple[Span, ...] = _NO_SPANS
    micro_batch_s: Amount = 0.0
