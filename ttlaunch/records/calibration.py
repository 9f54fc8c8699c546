"""What a calibration has measured: one file of each copy of a plan's ranks, and what is kept of all of them.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Amount, Count, Flag, Size, Text, Word, record

KEPT_FORMAT = 2


def rehearsal_file(copy: int) -> str:
    """Return the name of the file that one copy of the ranks writes."""
    return f"rehearsal-{copy}.json"


@record
class LinkSample:
    """What a message of one size took of the cores of its two ranks.

    Attributes:
        median_s: The median of its repeats, each after something else was computed.
        low_s, high_s: What a tenth and nine tenths of them do not exceed.
    """

    size: Size
    repeats: Count
    median_s: Amount
    low_s: Amount
    high_s: Amount


@record
class MeasuredLink:
    """What messages between two ranks cost their cores: `latency_s` and a part for each byte, and the samples that these two were fitted to.

    Attributes:
        again_s: In place of `latency_s` for a message that begins right after another one.
    """

    latency_s: Amount
    again_s: Amount
    bytes_per_s: Amount
    samples: tuple[LinkSample, ...]


@record
class RehearsedStep:
    """One step of one rank on the clock of the rehearsal, in seconds.

    Attributes:
        all_s: From the step's beginning to its end.
        exposed_s: It waited for a message that was under way.
        waiting_s: It waited for a rank that had not begun to send or to receive.
        phases: The time of each phase, waits included.
        elapsed_s: How long what it computed took by the clock on the wall, which also runs while other programs have the core.
        passes: Its forward passes.
    """

    all_s: Amount
    exposed_s: Amount
    waiting_s: Amount
    phases: dict[str, Amount]
    elapsed_s: Amount
    passes: Count


@record
class RehearsedRank:
    """The steps of one rank, without the first ones."""

    role: Word
    steps: tuple[RehearsedStep, ...]


@record
class RehearsalEnd:
    """What one copy of the ranks has found.

    Attributes:
        findings: Why it cannot be used, in words; empty if it can.
        is_spare: Whether it has ended early, because fewer ranks compute at a time than there are copies, or has not begun, because the copy
            before it left it too little time.
    """

    ranks: tuple[RehearsedRank, ...]
    link: MeasuredLink | None
    findings: tuple[Text, ...]
    is_spare: Flag = False


@record
class KeptRank:
    """What is kept of a rank: for each part of a step its median, and times that a tenth and nine tenths of all steps do not exceed."""

    role: Word
    passes: Count
    parts: dict[str, tuple[Amount, ...]]


@record
class KeptPlan:
    """What is kept of a plan.

    Attributes:
        made: When it was measured, in seconds since the epoch.
        copies: How many copies of the ranks have steps that count: at the same time, or one after the other if the plan has one rank.
        steps: How many steps of each rank counted.
        busy: Elapsed time divided by processor time: 1 on a machine with nothing else to do.
        halves: By how much the medians of every second step and of the others differ.
        link: What messages cost; None: the plan has one rank.
    """

    made: Amount
    copies: Count
    steps: Count
    busy: Amount
    halves: Amount
    ranks: tuple[KeptRank, ...]
    link: MeasuredLink | None


@record
class KeptCalibration:
    """All that is kept of one host for one release of ttlaunch, by the key of the plan."""

    format: Count
    host: Text
    release: Text
    plans: dict[str, KeptPlan]
