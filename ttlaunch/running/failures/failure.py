"""The first failure of a run as everybody tells it: the diagnostic, `report.json`, `ttlaunch report`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.lost_hosts import RANKS_WENT_WITH_HOST

_MOST_NAMED = 8
_CLAUSES = {
    Cause.LOST_PEER: ("lost its peer", "lost their peer"),
    Cause.ENDED: ("was ended with the run", "were ended with the run"),
    Cause.FENCED: RANKS_WENT_WITH_HOST,
}


@dataclass(frozen=True)
class Follower:
    """A rank that broke or was ended after the first one.

    Attributes:
        cause: One clause that follows "rank 3".
        time: Seconds since the epoch, None if unknown.
    """

    rank: int
    role: str
    kind: Cause
    cause: str
    time: float | None


@dataclass(frozen=True)
class Failure:
    """The first failure of a run.

    Attributes:
        code: An `R` code.
        cause: One clause that follows "rank 3 (aggregator, host)".
        time: Seconds since the epoch, None if unknown.
        evidence: Facts for notes.
        kind: Its class.
        when: What the step cannot say, such as "while it was starting".
        followers: The ranks that broke or were ended after it.
        last_lines: Of the rank's standard error.
        next_step: What to type or change; None where the log has to be read.
        comes_again: Whether a new start would meet it again: another MPI, a missing program, a full disk. For the
            supervisor that decides so while the run is in memory; `report.json` does not hold it.
        of_engine: Whether the engine failed and no rank did; not in `report.json` either.
    """

    code: str
    rank: int | None
    role: str | None
    host: str | None
    step: int | None
    cause: str
    time: float | None
    place: str | None = None
    evidence: tuple[str, ...] = ()
    kind: Cause = Cause.OTHER
    when: str | None = None
    followers: tuple[Follower, ...] = ()
    last_lines: tuple[str, ...] = ()
    next_step: str | None = None
    comes_again: bool = False
    of_engine: bool = False

    @property
    def message(self) -> str:
        """The first line of the diagnostic."""
        if self.rank is None:
            return self.cause
        when = f" in step {self.step}" if self.step else f" {self.when}" if self.when else ""
        return f"rank {self.rank} ({self.role}, {self.host}) {self.cause}{when}"

    def as_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "class": str(self.kind),
            "rank": self.rank,
            "role": self.role,
            "host": self.host,
            "step": self.step,
            "cause": self.cause,
            "when": self.when,
            "place": self.place,
            "time": self.time,
            "evidence": list(self.evidence),
            "cascade": [{"class": str(one.kind), **_without_kind(one)} for one in self.followers],
            "last_lines": list(self.last_lines),
            "next_step": self.next_step,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """What `as_json` was made of.

        Raises:
            KeyError, TypeError, ValueError: It is no such record.
        """
        values = {name: value for name, value in _without_class(record).items() if name != "cascade"}
        lists = {name: tuple(record[name]) for name in ("evidence", "last_lines")}
        followers = tuple(Follower(**{**_without_class(one), "kind": Cause(one["class"])}) for one in record["cascade"])
        return cls(**{**values, **lists, "kind": Cause(record["class"]), "followers": followers})


def render_cascade(followers: Sequence[Follower]) -> str | None:
    """What happened to the other ranks, as one line; None if nothing did."""
    by_cause: dict[str, list[Follower]] = {}
    for one in followers:
        by_cause.setdefault(str(one.kind) if one.kind in _CLAUSES else one.cause, []).append(one)
    if not by_cause:
        return None
    return "then " + ", ".join(_clause(group) for group in by_cause.values())


def _clause(group: Sequence[Follower]) -> str:
    """What is said of followers with one fate; those that broke by themselves are told as they were."""
    one, several = _CLAUSES.get(group[0].kind, (group[0].cause, group[0].cause))
    return f"{_named(member.rank for member in group)} {one if len(group) == 1 else several}"


def _named(ranks: Iterable[int]) -> str:
    """`rank 0, 1 and 3`; many are counted."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _MOST_NAMED:
        return f"{len(names)} ranks"
    return f"rank {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"rank {names[0]}"


def _without_kind(one: Follower) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "kind"}


def _without_class(one: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "class"}
