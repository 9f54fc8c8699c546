"""Draw a plan of faults at random, the same one for the same seed and run."""

import random

from ttlaunch.planning.fault_checks import Field
from ttlaunch.planning.faults import AtSecond, AtStep, Fault, Kind, Target, Verb

_LATEST_MS = 10_000


def draw_faults(ground: Field, *, count: int, seed: int) -> list[Fault]:
    """So many faults, each of a kind, a target and a moment drawn evenly; their order in time is that of the list.

    Args:
        ground: What they may hit. Moments are steps before the last where it is known which that is, else seconds.
        count: How many.
        seed: Equal seeds draw equal plans.
    """
    chance = random.Random(f"faults {seed}")  # noqa: S311 - nothing secret
    rows, hosts = ground.ranks, ground.hosts
    kinds = [(verb, Kind.RANK) for verb in (Verb.KILL, Verb.STOP, Verb.TERM, Verb.SEGV)]
    kinds += [(Verb.KILL, Kind.SHIM), (Verb.KILL, Kind.ENGINE), (Verb.INTERRUPT, Kind.RUN)]
    if not ground.is_here:
        kinds += [(Verb.KILL, Kind.AGENT), (Verb.CUT, Kind.HOST)]
    drawn = []
    for _ in range(count):
        verb, kind = chance.choice(kinds)
        value: int | str = ""
        if kind in {Kind.RANK, Kind.SHIM}:
            value = chance.choice(rows).rank
        elif kind in {Kind.AGENT, Kind.HOST}:
            value = chance.choice(hosts)
        drawn.append((verb, Target(kind, value)))
    moments = sorted(_draw_moment(ground, chance) for _ in range(count))
    steps = _has_steps(ground)
    return [
        Fault(verb, target, AtStep(moment) if steps else AtSecond(moment))
        for (verb, target), moment in zip(drawn, moments, strict=True)
    ]


def _has_steps(ground: Field) -> bool:
    return ground.takes_steps and ground.last_step is not None and (ground.first_step or 1) < ground.last_step


def _draw_moment(ground: Field, chance: random.Random) -> int:
    if not _has_steps(ground) or ground.last_step is None:
        return chance.randrange(1, _LATEST_MS // 100) * 100
    return chance.randrange(ground.first_step or 1, ground.last_step)
