"""What `ttlaunch simulate --virtual` asks its process for, and what that process has found: `virtual-order.json`, `virtual.json`.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Amount, Count, Flag, Rank, Size, Text, record

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
class VirtualOrder:
    """What to simulate.

    Attributes:
        steps: How many steps of the training.
        gflops: How many 10^9 floating-point operations a rank computes in a second; ignored with `compute_s`.
        compute_s: How long the forward and backward pass of one micro-batch through the whole model takes; 0: not given.
        latency_s, bytes_per_s: What a message costs.
        slow: Ranks that take longer, and how many times as long.
        slow_links: Ranks whose port is slower, and how many times.
        fold: Whether ranks that do the same run once; those that share links never do.
        network: The links that they share; None: each has a port of its own.
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


@record
class Span:
    """Ranks from the first to the last one."""

    first: Rank
    last: Rank


@record
class VirtualClass:
    """How each of some ranks that do the same has spent the time of its steps, in seconds of all of its steps together.

    Attributes:
        members: The ranks.
        steps: How many steps each has done; 0 for ranks that count none.
        all_s: The time in its steps, or if it counts none its whole time.
        each_s: The time of each of its steps.
        facts: Its numbers for the formula of its traffic.
    """

    members: tuple[Span, ...]
    steps: Count
    all_s: Amount
    computing_s: Amount
    exposed_s: Amount
    waiting_s: Amount
    each_s: tuple[Amount, ...]
    facts: dict[str, Size]


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
class VirtualEnd:
    """The result.

    Attributes:
        classes: Each rank is in one of them.
        findings: Mistakes in the messages, in words.
        flops_per_s: How many floating-point operations a rank that is not slow computes in a second.
        not_folded: Why every rank ran although equal ones were to run once, as a clause; None if that is not so.
    """

    classes: tuple[VirtualClass, ...]
    edges: tuple[VirtualEdge, ...]
    findings: tuple[Text, ...]
    flops_per_s: Amount
    not_folded: Text | None
