"""Run all ranks of a recipe in one process on this machine: `ttlaunch.simulate`."""

import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from ttlaunch.agent import SHIM
from ttlaunch.app.dialogue import Dialogue, Unattended, stop_on_errors
from ttlaunch.app.library import ClusterOptions
from ttlaunch.app.order import checked_options, no_target, refuse_strangers, spec_of
from ttlaunch.app.resolve import ResolvedSpec, is_script, resolve
from ttlaunch.app.run_diagnostics import checkpoint_diagnostics, failure_diagnostic, line_label, traffic_diagnostics
from ttlaunch.app.run_spec import LOCAL, RunSpec
from ttlaunch.diagnostics import Diagnostic, LaunchError, Source, file_error, render, usage_error
from ttlaunch.diagnostics.html import facts_html, text_html
from ttlaunch.engines.choose import ENGINES
from ttlaunch.lab.play import Played, play_ranks
from ttlaunch.planning.elastic import plan_replacements
from ttlaunch.planning.launch_plan import GRPC_PACKAGES, LaunchPlan, RecipeProgram
from ttlaunch.planning.make import Surroundings
from ttlaunch.planning.recipe_plan import RecipeChoice, plan_recipe
from ttlaunch.records.simulation import SimulatedFinding, as_json
from ttlaunch.running.logs.output import SilentView, View
from ttlaunch.running.preflight import check_packages
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.spec.recipe.config import check_one_process

_MOST_RANKS = 65_536
_ROOM = Source("what a simulation has room for", f"localhost slots={_MOST_RANKS}")

MakesView = Callable[[LaunchPlan, RunFolder], AbstractContextManager[View]]
"""Makes a view of a simulation from its plan and its folder."""


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        plan: The plan of the run that was simulated; its engine was not started.
        status: "done" or "failed".
        exit_status: The exit status of `ttlaunch simulate`.
        parameters_sha256: The hash of all parameters; None if the ranks did not report it.
        diagnostics: Mistakes in messages first, then all others.
        edges: Messages and bytes by source and destination.
        details: The whole result, as `ttlaunch simulate --format json` prints it.
        played: The result as the process of the ranks gave it.
    """

    plan: LaunchPlan
    status: str
    exit_status: int
    parameters_sha256: str | None
    diagnostics: tuple[Diagnostic, ...]
    edges: tuple[Mapping[str, Any], ...]
    details: Mapping[str, Any]
    played: Played

    def raise_for_failure(self) -> None:
        """Raise the diagnostics as an error unless the simulation completed without a mistake.

        Raises:
            LaunchError: The simulation failed, or found a mistake.
        """
        if self.exit_status:
            raise LaunchError(self.diagnostics, status=self.exit_status)

    def as_json(self) -> Mapping[str, Any]:
        """Return what `ttlaunch simulate --format json` prints."""
        return self.details

    def _repr_html_(self) -> str:
        """Show the results and the diagnostics in a notebook."""
        ranks, sent = self.plan.world_size, sum(edge["bytes"] for edge in self.edges)
        facts = {"status": self.status, "ranks": ranks, "bytes sent": sent, "parameters": self.parameters_sha256}
        return facts_html(facts) + (text_html(render(self.diagnostics)) if self.diagnostics else "")


def simulate(target: str | Path, *, keep: str | Path | None = None, **options: Unpack[ClusterOptions]) -> Simulation:
    """Run all ranks of a recipe in one process, with the same bits as a run, and report mismatched messages.

    Args:
        target: A recipe's name or folder.
        keep: Folder for records and checkpoints, which must not exist yet; None keeps nothing.
        options: The same options as for `ttlaunch.plan`.

    Raises:
        LaunchError: The options, the description, the recipe or its configuration has a mistake.
    """
    refuse_strangers("simulate", options, tuple(ClusterOptions.__annotations__))
    if target is None or not isinstance(target, str | Path):
        raise no_target("a recipe's name or folder")
    given = checked_options({**options, "keep": keep})
    plan = plan_simulation(spec_of(target, given), Unattended())
    return run_simulation(plan, keep=Path(given["keep"]) if "keep" in given else None)


def plan_simulation(
    spec: RunSpec,
    dialogue: Dialogue,
    *,
    working_folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    has_room: bool = False,
) -> LaunchPlan:
    """Plan a simulation of a run on the specified hosts, without connecting to them: all ranks run here, without MPI.

    Args:
        spec: The run.
        dialogue: Gets warnings.
        working_folder: The folder to which relative paths are relative; None for the current folder.
        environment: The variables of the shell, of which the ranks get some.
        has_room: Whether this machine, where no cluster is named, takes any number of ranks.

    Raises:
        LaunchError: A diagnostic is an error, or the target is no recipe.
    """
    working_folder = working_folder or Path.cwd()
    if is_script(str(spec.target), working_folder):
        message = f"`simulate` takes a recipe; {spec.target} is a program"
        raise usage_error(message, f"`ttlaunch run {spec.target}`")
    room = _room(spec) if has_room and spec.on == LOCAL and spec.hostfile is None else None
    resolved = resolve(spec, working_folder=working_folder, dialogue=dialogue, hosts=room)
    choice, layout, topology = resolved.choice, resolved.layout, resolved.topology
    if choice is not None and layout is not None:
        resolved.diagnostics += check_one_process(choice.recipe, choice.loaded, world_size=layout.world_size)
    if not resolved.ok or choice is None or layout is None or topology is None:
        raise LaunchError(resolved.diagnostics)
    surroundings = Surroundings(
        working_folder, dict(environment), sys.executable, str(SHIM), ENGINES[0].never_started()
    )
    plan = plan_recipe(
        choice,
        layout,
        topology,
        surroundings=surroundings,
        replay=spec.replay,
        updates=spec.updates,
        epochs=spec.epochs,
    )
    assert isinstance(plan.program, RecipeProgram)  # noqa: S101 - it was made from a recipe
    missing = check_packages(plan.program, without=["mpi4py", *GRPC_PACKAGES])
    stop_on_errors([*resolved.diagnostics, *missing], dialogue)
    return _with_replacements(plan, resolved, choice)


def _with_replacements(plan: LaunchPlan, resolved: ResolvedSpec, choice: RecipeChoice) -> LaunchPlan:
    if resolved.elastic is None:
        return plan
    elastic = plan_replacements(plan, resolved.elastic, choice)
    if isinstance(elastic, Diagnostic):
        raise LaunchError([elastic])
    return elastic


def _room(spec: RunSpec) -> Source:
    """Return the hosts of a simulation that names no cluster.

    Raises:
        LaunchError: It has more ranks than there is room for.
    """
    if (spec.ranks or 0) > _MOST_RANKS:
        message = f"`--ranks {spec.ranks}` was given, but a simulation has room for {_MOST_RANKS:,} ranks"
        raise usage_error(message, f"`--ranks {_MOST_RANKS}`")
    return _ROOM


def run_simulation(
    plan: LaunchPlan,
    *,
    keep: Path | None,
    show: MakesView = lambda _plan, _folder: nullcontext(SilentView()),
    cancelled: threading.Event | None = None,
) -> Simulation:
    """Run all ranks of a plan in one child process.

    Args:
        plan: The plan of a recipe.
        keep: Folder for records and checkpoints; None keeps nothing.
        show: Makes the view that receives output and records as they arrive.
        cancelled: The simulation ends when another thread sets it.

    Raises:
        LaunchError: The folder already exists, or cannot be written.
    """
    if keep is not None and os.path.lexists(keep):  # never raises
        raise usage_error(f"{keep} already exists", "name another folder")
    place = str(keep) if keep is not None else "the folder for temporary files (`TMPDIR`)"
    run_id, environment = f"simulation-{secrets.token_hex(2)}", dict(os.environ)
    with ExitStack() as stack:
        try:
            if keep is None:
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttl-simulation-")))
            else:
                path = keep.resolve()
                path.mkdir(parents=True)
            view = stack.enter_context(show(plan, RunFolder(run_id, path)))
            played = play_ranks(
                plan,
                path,
                python=sys.executable,
                environment=environment,
                view=view,
                run_id=run_id,
                saves=keep is not None,
                cancelled=cancelled,
            )
        except OSError as error:
            raise file_error(place, error) from error
        found = _diagnostics(played, [Path(plan.program.folder)] if isinstance(plan.program, RecipeProgram) else [])
    details = {**played.as_json(), "diagnostics": [diagnostic.as_json() for diagnostic in found]}
    report = played.report
    status, digest = report.exit_status, report.parameters_sha256
    return Simulation(plan, report.status, status, digest, tuple(found), tuple(as_json(played.edges)), details, played)


def _diagnostics(played: Played, programs: Sequence[Path]) -> list[Diagnostic]:
    """Return the diagnostics of a simulation: mistakes in messages, then everything else."""
    found = [_diagnostic(finding, programs) for finding in played.findings]
    if played.report.status == "done":  # otherwise the failure should come first
        found += traffic_diagnostics(played.report.traffic, [rank["role"] for rank in played.report.ranks])
    found += checkpoint_diagnostics(played.report)
    failure = failure_diagnostic(played.report, RunFolder(played.report.run_id, Path()), programs=programs)
    next_step = played.report.failure.next_step if played.report.failure else None
    return found + ([replace(failure, hints=(next_step,) if next_step else ())] if failure else [])


def _diagnostic(finding: SimulatedFinding, programs: Sequence[Path]) -> Diagnostic:
    labels = [line_label(side.place.file, side.place.line, side.text, programs=programs) for side in finding.sides]
    seen = [label for label in labels if label is not None]
    unseen = [side.text for side, label in zip(finding.sides, labels, strict=True) if label is None]
    return Diagnostic(
        finding.code,
        finding.message,
        seen[0] if seen else None,
        tuple(seen[1:]),
        notes=(*unseen, *finding.notes),
        hints=(finding.hint,),
    )
