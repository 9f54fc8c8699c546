"""Check that a run has the ranks, roles, hosts and steps that the faults of a plan name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Span, did_you_mean, listed, shown
from ttlaunch.planning.faults import ELASTIC, FLIPS, AtStep, Fault, Kind, Verb
from ttlaunch.planning.launch_plan import LaunchPlan, RankRow, RecipeProgram


@dataclass(frozen=True)
class FaultScope:
    """The possible targets and moments of faults in a run.

    Attributes:
        is_here: Whether all ranks run on the launching machine.
        takes_steps: Whether ranks report steps at all.
        is_elastic: Whether workers come and go; `ranks` then has those that may start later, too.
        first_step, last_step: The first and last step of the run; None if unknown.
    """

    ranks: tuple[RankRow, ...]
    is_here: bool
    takes_steps: bool = True
    is_elastic: bool = False
    first_step: int | None = 1
    last_step: int | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.host for row in self.ranks))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.role for row in self.ranks))


def scope_of(plan: LaunchPlan, *, is_here: bool) -> FaultScope:
    """Return the possible targets and moments of faults in a plan."""
    recipe = plan.program if isinstance(plan.program, RecipeProgram) else None
    if recipe is None:
        return FaultScope(plan.ranks, is_here, takes_steps=False)
    begins_after = int((recipe.start or {}).get("step") or 0)
    last = (recipe.config.get("training_config") or {}).get("steps")
    is_elastic = plan.elastic is not None
    return FaultScope(plan.ranks, is_here, is_elastic=is_elastic, first_step=begins_after + 1, last_step=last)


def check_faults(faults: Sequence[Fault], scope: FaultScope) -> Iterator[Diagnostic]:
    """Report every fault whose target the run does not have, or whose moment the run never reaches."""
    for fault in faults:
        found = _check_target(fault, scope) or _check_moment(fault, scope)
        if found is not None:
            yield found


def targets_of(fault: Fault, ranks: Sequence[RankRow]) -> tuple[int, ...]:
    """Return the ranks that a fault hits; empty if its target is not a rank."""
    value = fault.target.value
    match fault.target.kind:
        case Kind.RANK | Kind.SHIM:
            return tuple(row.rank for row in ranks if row.rank == value)
        case Kind.ROLE:
            return tuple(row.rank for row in ranks if row.role == value)
        case Kind.HOST if fault.verb is not Verb.CUT:
            return tuple(row.rank for row in ranks if row.host == value)
        case _:
            return ()


def _check_target(fault: Fault, scope: FaultScope) -> Diagnostic | None:
    kind, value = fault.target.kind, fault.target.value
    if fault.verb in ELASTIC and not scope.is_elastic:
        what = f"`{shown(fault.verb)}` needs a run whose workers come and go"
        label = "the ranks of this run stay the same"
        return _refused("P037", what, fault.target_span, label=label, hints=("`--elastic MIN:MAX` lets them",))
    if fault.verb is Verb.FLIP and scope.is_elastic:
        label, hint = "the workers of this run come and go", "`flip-gradient` and `flip-activation` can be used here"
        return _refused(
            "P037", f"`{fault.verb}` needs ranks that stay the same", fault.target_span, label=label, hints=(hint,)
        )
    if kind in {Kind.RANK, Kind.SHIM} and value not in {row.rank for row in scope.ranks}:
        last = len(scope.ranks) - 1
        return _missing(fault, f"the run has ranks 0 to {last}" if last else "the run has rank 0 alone")
    if kind is Kind.ROLE and value not in scope.roles:
        return _missing(fault, f"the run has {listed(scope.roles, last='and')}", scope.roles)
    if kind in {Kind.HOST, Kind.AGENT} and value not in scope.hosts:
        return _missing(fault, f"the run has {listed(scope.hosts, last='and')}", scope.hosts)
    if scope.is_here and (kind is Kind.AGENT or fault.verb is Verb.CUT):
        what = f"`{shown(fault.verb)} {shown(fault.target)}` needs a run over hosts"
        hints = ("`--on NAME` names a cluster of several machines",)
        return _refused("P037", what, fault.target_span, label="all ranks run on this machine", hints=hints)
    return None


def _missing(fault: Fault, has: str, known: Sequence[str] = ()) -> Diagnostic:
    message = f"`{shown(fault.target)}` is not in this run"
    hints = did_you_mean(str(fault.target.value), known)
    return _refused("P037", message, fault.target_span, label=has, hints=hints)


def _check_moment(fault: Fault, scope: FaultScope) -> Diagnostic | None:
    if fault.verb in FLIPS and not (isinstance(fault.moment, AtStep) and scope.takes_steps):
        label = "expected a step, such as `step=5`" if scope.takes_steps else "only ranks of recipes have steps"
        return _refused("P038", "a bit flips after a step of a recipe", fault.moment_span, label=label, hints=())
    if not isinstance(fault.moment, AtStep):
        return None
    step, hints = fault.moment.step, ("a moment in seconds after the start is written `10s`",)
    message = f"`{fault.moment}` never comes"
    in_the_next = fault.verb in FLIPS - {Verb.FLIP}
    if not scope.takes_steps:
        text = "only ranks of recipes report steps"
    elif in_the_next and step == scope.last_step:
        text, hints = "no step follows in which the bit could flip", (f"`step={step - 1}` flips it in the last step",)
    elif scope.last_step is not None and step > scope.last_step:
        text, hints = f"the run ends after step {scope.last_step}", (f"`step={scope.last_step}` is the last",)
    elif scope.first_step is not None and step < scope.first_step:
        text, hints = f"the run begins with step {scope.first_step}", (f"`step={scope.first_step}` is the first",)
    else:
        return None
    return _refused("P038", message, fault.moment_span, label=text, hints=hints)


def _refused(code: str, message: str, span: Span | None, *, label: str, hints: tuple[str, ...]) -> Diagnostic:
    place = Label(span, label) if span else None
    return Diagnostic(code, message, place, hints=hints, blame=Blame.COMMAND_LINE)
