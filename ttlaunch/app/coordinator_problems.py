"""Describe what a run's coordinator refuses, or why it gives no answer."""

from ttlaunch.diagnostics import Blame, Diagnostic, shown
from ttlaunch.running.membership.client import NoAnswerError, Problem, RefusedError
from ttlaunch.running.membership.fingerprints import NAMES, Difference

_LONGEST = 300
_UNAUTHORISED = 401
INVITES = "`ttlaunch workers RUN --invite`, typed where the run was started, prints an address and a token"
_REPAIRS = {
    Problem.UNREACHABLE: "`ttlaunch ps`, typed where the run was started, shows whether it goes on; a firewall may close the port",
    Problem.STRANGER: INVITES,
    Problem.UNUSABLE: "the same version of ttlaunch is needed on both machines; `ttlaunch --version` prints it",
}


def no_answer(error: NoAnswerError, place: str) -> Diagnostic:
    """Say why nothing was heard of a coordinator; `place` is its address."""
    message = f"the run at {shown(place, longest=_LONGEST)} gives no answer: {shown(error, longest=_LONGEST)}"
    if error.problem is Problem.STRANGER:
        message = f"{shown(place, longest=_LONGEST)} is not the run of the invitation: {shown(error, longest=_LONGEST)}"
    return Diagnostic("R080", message, hints=(_REPAIRS[error.problem],), blame=Blame.HOSTS)


def refused(error: RefusedError) -> Diagnostic:
    """Say what a coordinator refuses: a machine that differs, or anything else."""
    found = [Difference(one.field, one.run, one.worker) for one in error.refusal.differences]
    if found:
        return different(found)
    hints = tuple(shown(hint, longest=_LONGEST) for hint in error.refusal.hints)
    hints = (INVITES,) if error.status == _UNAUTHORISED else hints
    return Diagnostic("R081", f"the run refuses: {error}", hints=hints, blame=Blame.HOSTS)


def different(found: list[Difference]) -> Diagnostic:
    """Name everything in which this machine differs from a run, with both values."""
    names = shown(", ".join(one.field for one in found), longest=200)
    notes = tuple(
        f"{NAMES.get(one.field, shown(one.field))}: {_value(one.run)} in the run, {_value(one.worker)} here"
        for one in found
    )
    message = f"this machine differs from the run in {names}, so its results would have other bits"
    hint = "`ttlaunch explain R083` says how to make them equal; nothing was started, and the token can still be used"
    return Diagnostic("R083", message, notes=notes, hints=(hint,), blame=Blame.HOSTS)


def _value(text: str) -> str:
    return f"`{shown(text, longest=80)}`" if text else "none"
