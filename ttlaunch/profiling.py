"""What launcher and rank share about torch's profiler: the steps that it records, and where each rank writes its trace.

Standard library only, because the launcher imports this file too.
"""

from __future__ import annotations

ENV_PROFILE_STEPS = "TTLAUNCH_PROFILE_STEPS"
"""The steps, as `--profile-steps` has them; set by the plan, and only with that option."""


def profile_file(rank: int) -> str:
    """The rank's trace in Chrome's format, compressed; relative to the run folder."""
    return f"records/rank-{rank}.profile.json.gz"


def parse_steps(text: str) -> range | None:
    """Parse `5-7`, or `5` alone, into a range of at least one step; None for any other text."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or not (last.isdecimal() if dash else True):
        return None
    steps = range(int(first), int(last if dash else first) + 1)
    return steps if steps and steps[0] > 0 else None
