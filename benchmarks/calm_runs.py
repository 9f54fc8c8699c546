"""Runs that are slow but get on, for `benchmarks/hangs.py --false-alarms`: none of them may be taken for a hang.

Times are those of real training, divided by `factor`. A run gets the timeout that the rule gives it once ten steps have been
timed, the larger of 30 s and ten times its slowest step, divided by the same.
"""

import random
from typing import NamedTuple

LEAST_TIMEOUT_S, SLOWEST_STEPS = 30.0, 10.0
_SHORTEST_STEP_S, _LONGEST_STEP_S = 0.1, 20.0
_RANKS = 3


class Calm(NamedTuple):
    """A run that may not be taken for a hang.

    Attributes:
        words: Of the command line, after `ttlaunch run`.
        order: For its ranks.
        timeout_s: For `--hang-timeout`; None: it is not given.
        sleep_s: For how long the launcher is stopped once the run is under way.
    """

    name: str
    words: tuple[str, ...]
    order: dict[str, object]
    timeout_s: float | None
    sleep_s: float = 0.0


def calm_runs(chance: random.Random, factor: float) -> list[Calm]:
    """One of each kind.

    Args:
        chance: Draws steps.
        factor: How many times faster than real training they are.
    """
    one = [_SHORTEST_STEP_S]
    drawn = [chance.uniform(_SHORTEST_STEP_S, _LONGEST_STEP_S) for _ in range(12)]
    loading = [*[chance.uniform(0.1, 0.5) for _ in range(4)], 25.0]
    quiet_s = LEAST_TIMEOUT_S / factor
    return [
        _peers("short steps", one, 100, factor),
        _peers("steps of 0.1 to 20 s, uneven ranks", drawn, 12, factor, timeout_s=_timeout(max(drawn))),
        _peers("pauses to load data", loading, 10, factor, timeout_s=LEAST_TIMEOUT_S),
        _peers("announced pauses", [0.75 * LEAST_TIMEOUT_S], 2, factor, hang="pauses", timeout_s=LEAST_TIMEOUT_S),
        _peers("a launcher that sleeps", [2.0], 60, factor)._replace(sleep_s=2 * quiet_s),
        Calm("a silent program", ("rare.py", "-n", "2", "--", "2", f"{2 * quiet_s}"), {}, None),
        Calm("a program that prints rarely", ("rare.py", "-n", "2", "--", "4", f"{0.75 * quiet_s}"), {}, quiet_s),
    ]


def _peers(
    name: str, pace: list[float], steps: int, factor: float, *, hang: str = "", timeout_s: float = LEAST_TIMEOUT_S
) -> Calm:
    order = {"hang": hang, "rank": 0, "step": 0, "steps": steps, "pace": [seconds / factor for seconds in pace]}
    return Calm(name, ("peers", "-n", str(_RANKS)), order, timeout_s / factor)


def _timeout(slowest_s: float) -> float:
    return max(LEAST_TIMEOUT_S, SLOWEST_STEPS * slowest_s)
