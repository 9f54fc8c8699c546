"""The faults that a user requests for a run, such as `kill rank=2 at step=5`, and their notation."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ttlaunch.diagnostics import Span


class Verb(StrEnum):
    """The action of a fault."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP
    CONTINUE = "continue"  # SIGCONT
    TERM = "term"  # SIGTERM
    SEGV = "segv"  # SIGSEGV
    INTERRUPT = "interrupt"  # Ctrl-C to the run
    CUT = "cut"  # as if the network cable of a host were cut
    JOIN = "join"  # another worker starts, in an elastic run
    FLIP = "flip"  # a bit of a parameter flips, as in failing memory
    FLIP_GRADIENT = "flip-gradient"  # a bit of a gradient flips in the step that follows
    FLIP_ACTIVATION = "flip-activation"  # a bit of what a layer hands on flips there
    LEAVE = "leave"  # a worker of an elastic run is asked to leave


class Kind(StrEnum):
    """The kinds of targets that a fault can have."""

    RANK = "rank"
    ROLE = "role"  # all ranks of the role
    HOST = "host"  # all ranks on the host, or the host itself
    SHIM = "shim"  # the parent of a rank
    AGENT = "agent"  # the agent of the run on a host
    ENGINE = "mpirun"  # the engine's own process, for any engine
    LAUNCHER = "launcher"  # ttlaunch itself
    RUN = ""  # the target of an interrupt or of a worker that joins, which is not written


NUMBERED = (Kind.RANK, Kind.SHIM)
NAMED = (Kind.ROLE, Kind.HOST, Kind.AGENT)
ALONE = (Kind.ENGINE, Kind.LAUNCHER)
FLIPS = frozenset({Verb.FLIP, Verb.FLIP_GRADIENT, Verb.FLIP_ACTIVATION})
"""The verbs for which the rank itself flips a bit: only it knows where its tensors are."""
_SIGNALS = frozenset({Verb.KILL, Verb.STOP, Verb.CONTINUE, Verb.TERM, Verb.SEGV})
VERBS_FOR = {
    Kind.RANK: _SIGNALS | FLIPS | {Verb.LEAVE},
    Kind.ROLE: _SIGNALS,
    Kind.HOST: _SIGNALS | {Verb.CUT},
    Kind.SHIM: frozenset({Verb.KILL}),
    Kind.AGENT: frozenset({Verb.KILL}),
    Kind.ENGINE: frozenset({Verb.KILL}),
    Kind.LAUNCHER: frozenset({Verb.TERM}),
    Kind.RUN: frozenset({Verb.INTERRUPT, Verb.JOIN}),
}
"""The verbs that each kind of target accepts."""
ELASTIC = frozenset({Verb.JOIN, Verb.LEAVE})
"""The verbs for runs whose workers come and go."""


@dataclass(frozen=True)
class Target:
    """The target of a fault.

    Attributes:
        value: A rank's number, or a name; empty for a kind with only one target.
    """

    kind: Kind
    value: int | str = ""

    def __str__(self) -> str:
        return f"{self.kind}={self.value}" if self.kind in (*NUMBERED, *NAMED) else str(self.kind)


@dataclass(frozen=True)
class AtStep:
    """The moment when the target has reported a step; for a target without steps, when the furthest rank has."""

    step: int

    def __str__(self) -> str:
        return f"step={self.step}"


@dataclass(frozen=True)
class AtSecond:
    """A moment after the start of the run."""

    milliseconds: int

    def __str__(self) -> str:
        return f"{self.milliseconds / 1000:.15g}s"


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Attributes:
        target_span: The place of the target in the plan; for a fault without a target, the place of the verb.
        moment_span: The place of the moment in the plan.
    """

    verb: Verb
    target: Target
    moment: AtStep | AtSecond
    target_span: Span | None = field(default=None, compare=False, repr=False)
    moment_span: Span | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        words = (str(self.verb), str(self.target), "at", str(self.moment))
        return " ".join(word for word in words if word)


def render_faults(faults: Iterable[Fault]) -> str:
    """Write the plan of faults as it can be typed."""
    return "; ".join(str(fault) for fault in faults)
