"""Find hosts and a number of ranks for the next attempt of a run, without the hosts that do not answer."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.held_weights import find_held
from ttlaunch.app.prepare_run import PreparedRun
from ttlaunch.app.reach import connect_all, open_transports
from ttlaunch.app.resolve import ResolvedSpec, resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Diagnostic, counted, listed
from ttlaunch.errors import HostError
from ttlaunch.planning.fewer_ranks import largest_world
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.ending import keeps_checkpoints
from ttlaunch.running.restarts import Restart
from ttlaunch.spec.topology.model import Topology
from ttlaunch.spec.topology.without_hosts import leave_out, why_not_without


@dataclass(frozen=True)
class Replanned:
    """The specification of the next attempt.

    Attributes:
        request: The specification.
        change: How it differs from the first attempt, as clauses that follow "from the newest checkpoint"; "" if it does not.
    """

    request: RunSpec
    change: str = ""


def repeatable(request: RunSpec, folder: Path) -> RunSpec:
    """Replace what cannot be read a second time: a configuration from standard input, and served weights that were removed.

    Args:
        request: The specification that the user typed.
        folder: The folder of the first attempt, which has the resolved configuration, and what is held of the weights.
    """
    if request.resume is not None:
        request = replace(request, resume=find_held(request.resume, folder))
    if request.config_file != "-":
        return request
    return replace(request, config_file=str(folder / contract.TRAIN_FILE), overrides=())


def silent_hosts(topology: Topology, dialogue: Dialogue) -> Mapping[str, HostError]:
    """Return the hosts that do not answer, with reasons, after connecting to all at the same time."""
    transports, keys = open_transports(topology)
    try:
        return connect_all(transports, keys, dialogue).errors
    finally:
        for transport in transports:
            transport.close()


def replan(
    request: RunSpec,
    first: PreparedRun,
    decision: Restart,
    *,
    ask: Callable[[Topology], Mapping[str, HostError]],
) -> Replanned | Diagnostic:
    """Choose hosts and a number of ranks for the next attempt, or explain why there are none.

    If the hostfile has enough spare hosts, they replace the lost ones and the number of ranks stays. Otherwise the recipe continues
    with as many ranks as one of its layouts allows.

    Args:
        request: The specification that the user typed.
        first: The plan of the first attempt, made from this specification.
        decision: The checkpoint from which the attempt continues, and the hosts that it does not use.
        ask: Returns the hosts of a cluster that do not answer, such as `silent_hosts` does.
    """
    resume = str(decision.resume) if decision.resume else request.resume
    request = replace(request, resume=resume)
    if first.is_here:
        return Replanned(request)
    silent = ask(leave_out(first.topology, decision.excluded))
    without = {*decision.excluded, *silent}
    used = without.intersection(first.plan.hosts)
    if not used:
        return Replanned(replace(request, excluded=tuple(sorted(without))))
    reason = why_not_without(first.topology, without)
    if reason is not None:
        message = f"given up: the bindings allow no run without {_names(used)}: {reason}"
        return Diagnostic("R055", message, notes=_said_by(silent), hints=_back(used, first.plan))
    smaller = _smaller(replace(request, excluded=tuple(sorted(without))), first)
    if smaller is None:
        message = _no_world(first, leave_out(first.topology, without), used)
        return Diagnostic("R054", message, notes=_said_by(silent), hints=_back(used, first.plan))
    smallest, ranks = smaller
    return Replanned(smallest, _change(smallest, first, used, ranks=ranks, set_already=len(request.overrides)))


def _smaller(request: RunSpec, first: PreparedRun) -> tuple[RunSpec, int] | None:
    """Return the request adapted to the remaining hosts, and its number of ranks; None if no layout fits."""
    before, program = first.plan.world_size, first.plan.program
    left = leave_out(first.topology, request.excluded)
    slots = len(left.bindings) if left.bindings else len(left.slots)
    if not slots or not isinstance(program, RecipeProgram):
        return (request, before) if slots >= before else None
    asked = _resolve(request)
    if asked.ok and asked.layout is not None:
        return request, asked.layout.world_size
    if asked.choice is None or asked.choice.loaded.config is None:
        return request, before  # the specification has become wrong; preparing the attempt reports how
    world = largest_world(asked.choice, left, most=before, before=program.layout)
    if world is None:
        return None
    return replace(request, ranks=world.ranks, overrides=(*request.overrides, *world.overrides)), world.ranks


def _resolve(request: RunSpec) -> ResolvedSpec:
    """Resolve a request without its checkpoint, which is read when the attempt is prepared."""
    return resolve(replace(request, resume=None))


def _change(request: RunSpec, first: PreparedRun, used: Collection[str], *, ranks: int, set_already: int) -> str:
    """Describe how the attempt differs from the first one; the first `set_already` overrides are those that the user typed."""
    clauses = f", without {_names(used)}"
    left = leave_out(first.topology, request.excluded)
    taken = {str(slot.host.name) for slot in left.slots[:ranks]}
    spare = [str(host.name) for host in left.hosts if host.name in taken and host.name not in first.plan.hosts]
    clauses += f", with the spare host{'s' if len(spare) > 1 else ''} {_names(spare)}" if spare else ""
    before = first.plan.world_size
    clauses += f", {counted(ranks, 'rank')} instead of {before}" if ranks != before else ""
    overrides = " ".join(f"--set {text}" for text in request.overrides[set_already:])
    return f"{clauses} (`{overrides}`)" if overrides else clauses


def _no_world(first: PreparedRun, left: Topology, used: Collection[str]) -> str:

    if not left.hosts:
        return f"given up: no host is left without {_names(used)}"
    slots = counted(len(left.bindings) if left.bindings else len(left.slots), "slot")
    if isinstance(first.plan.program, RecipeProgram):
        return f"given up: {first.plan.program.name} has no layout for the {slots} left without {_names(used)}"
    ranks = counted(first.plan.world_size, "rank")
    return f"given up: {first.plan.program.name} runs with {ranks}, and {slots} are left without {_names(used)}"


def _said_by(silent: Mapping[str, HostError]) -> tuple[str, ...]:
    return tuple(f"{host} does not answer: {error.evidence}" for host, error in silent.items())


def _back(used: Collection[str], plan: LaunchPlan) -> tuple[str, ...]:

    if not keeps_checkpoints(plan):
        return ()
    return (f"once {_names(used)} {'is' if len(used) == 1 else 'are'} back, `--resume latest` goes on",)


def _names(hosts: Collection[str]) -> str:
    return listed(sorted(hosts), last="and", quote="")
