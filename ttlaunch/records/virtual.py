"""What `ttlaunch simulate --virtual` asks its process for, and what that process has found: `virtual-order.json`, `virtual.json`.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Amount, Count, Rank, Size, Text, record

VIRTUAL_ORDER_FILE = "virtual-order.json"
VIRTUAL_FILE = "virtual.json"


@record
class VirtualOrder:
    """What to simulate.

    Attributes:
        steps: How many steps of the training.
        gflops: How many 10^9 floating-point operations a rank computes in a second; ignored with `compute_s`.
        compute_s: How long the forward and backward pass of one micro-batch through the whole model takes; 0: not given.
        latency_s, bytes_per_s: What a message costs.
        slow: Ranks that take longer, and how many times as long.
    """

    steps: Count
    gflops: Amount
    compute_s: Amount
    latency_s: Amount
    bytes_per_s: Amount
    slow: dict[str, Amount]


@record
class VirtualRank:
    """How a rank has spent the time of its steps, in seconds of all of its steps together.

    Attributes:
        steps: How many it has done; 0 for a rank that counts none.
        all_s: The time in its steps, or if it counts none its whole time.
        each_s: The time of each of its steps.
        facts: Its numbers for the formula of its traffic.
    """

    rank: Rank
    steps: Count
    all_s: Amount
    computing_s: Amount
    exposed_s: Amount
    waiting_s: Amount
    each_s: tuple[Amount, ...]
    facts: dict[str, Size]


@record
class VirtualEdge:
    """Bytes from one rank to another, within steps and altogether."""

    source: Rank
    dest: Rank
    messages: Count
    bytes: Size
    step_bytes: Size


@record
class VirtualEnd:
    """The result.

    Attributes:
        findings: Mistakes in the messages, in words.
        flops_per_s: How many floating-point operations a rank that is not slow computes in a second.
    """

    ranks: tuple[VirtualRank, ...]
    edges: tuple[VirtualEdge, ...]
    findings: tuple[Text, ...]
    flops_per_s: Amount
