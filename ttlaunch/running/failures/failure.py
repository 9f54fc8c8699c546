"""The first failure of a run and the ranks that followed it, as diagnostics, `report.json` and `ttlaunch report` need them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.lost_hosts import RANKS_WENT_WITH_HOST

_MOST_NAMED = 8
_CLAUSES = {
    Cause.LOST_PEER: ("lost its peer", "lost their peer"),
    Cause.ENDED: ("was ended with the run", "were ended with the run"),
    Cause.FENCED: RANKS_WENT_WITH_HOST,
}


@dataclass(frozen=True, kw_only=True)
class Follower:
    """A rank that failed or was ended after the rank that failed first.

    Attributes:
        cause: A clause whose subject is the rank, such as "lost its peer".
        time: Seconds since the epoch, None if unknown.
    """

    kind: Cause
    rank: int
    role: str
    cause: str
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a run; the fields stand in the order of `report.json`.

    Attributes:
        code: The diagnostic's code, one of the `R` codes.
        kind: The class of the failure.
        rank: The rank that failed; None if a host, the run folder or the engine did.
        role, host, step: The role, host and step of the rank; None if unknown. Without a rank, only the step may be known.
        cause: A clause whose subject is the rank, such as "raised ValueError"; without a rank, a sentence.
        when: The time of the failure if no step can express it, such as "while it was starting".
        place: `file:line` of the user's code, None if unknown.
        time: Seconds since the epoch, None if unknown.
        evidence: Facts that the report shows as notes.
        followers: The ranks that failed or were ended after the first failure.
        last_lines: The end of the rank's standard error.
        next_step: What to type or change; None if the user has to read the log.
        comes_again: Whether the failure would occur again after a restart, such as a missing program or a full disk. Only
            the decision about a restart needs it; `report.json` does not contain it.
        of_engine: Whether the engine failed and no rank did; `report.json` does not contain it.
    """

    code: str
    kind: Cause = Cause.OTHER
    rank: int | None = None
    role: str | None = None
    host: str | None = None
    step: int | None = None
    cause: str
    when: str | None = None
    place: str | None = None
    time: float | None
    evidence: tuple[str, ...] = ()
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
        """Return the failure as `report.json` contains it."""
        return asdict(self, dict_factory=_named_as_in_json)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Make the failure from the record that `as_json` returns.

        Raises:
            KeyError, TypeError, ValueError: The record is not valid.
        """
        values = _named_as_in_code(record)
        lists = {name: tuple(values[name]) for name in ("evidence", "last_lines")}
        followers = tuple(Follower(**_named_as_in_code(one)) for one in values["followers"])
        return cls(**{**values, **lists, "followers": followers})


_JSON_NAMES = {"kind": "class", "followers": "cascade"}
_ONLY_IN_MEMORY = {"comes_again", "of_engine"}


def _named_as_in_json(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {
        _JSON_NAMES.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in fields
        if name not in _ONLY_IN_MEMORY
    }


def _named_as_in_code(record: Mapping[str, Any]) -> dict[str, Any]:
    names = {written: name for name, written in _JSON_NAMES.items()}
    return {**{names.get(name, name): value for name, value in record.items()}, "kind": Cause(record["class"])}


def rank_failure(row: RankRow, *, code: str, cause: str, time: float, **more: Any) -> Failure:
    """Make the failure of one rank; `more` are further fields of `Failure`."""
    return Failure(code=code, rank=row.rank, role=row.role, host=row.host, cause=cause, time=time, **more)


def render_cascade(followers: Sequence[Follower]) -> str | None:
    """Describe in one line what happened to the other ranks; None if nothing did."""
    by_cause: dict[str, list[Follower]] = {}
    for one in followers:
        by_cause.setdefault(str(one.kind) if one.kind in _CLAUSES else one.cause, []).append(one)
    if not by_cause:
        return None
    return "then " + ", ".join(_clause(group) for group in by_cause.values())


def _clause(group: Sequence[Follower]) -> str:
    """Describe ranks with one cause in a clause, such as `rank 0 and 2 lost their peer`."""
    one, several = _CLAUSES.get(group[0].kind, (group[0].cause, group[0].cause))
    return f"{name_ranks(member.rank for member in group)} {one if len(group) == 1 else several}"


def name_ranks(ranks: Iterable[int], *, noun: str = "rank") -> str:
    """List several ranks as `rank 0, 1 and 3`, with this noun; above a limit, only count them."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _MOST_NAMED:
        return f"{len(names)} ranks"
    return f"{noun} {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"rank {names[0]}"
