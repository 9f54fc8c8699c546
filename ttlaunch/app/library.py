"""What `import ttlaunch` offers: the use cases of the command line as functions.

No function prints, ends the process, or changes a signal handler, the environment or the working folder. A mistake in a
request raises `LaunchError` with the diagnostics that the command line would print. The result of a failed run is a `Report`.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ttlaunch import contract
from ttlaunch.app.coordinator_network import check_coordinator
from ttlaunch.app.dialogue import Dialogue, Unattended
from ttlaunch.app.execute import RunOptions, group_id
from ttlaunch.app.named_run import find_named_run, read_launcher_here, unreadable_run
from ttlaunch.app.order import Target, checked_options, no_target, refuse_strangers, spec_of
from ttlaunch.app.prepare_run import PreparedRun, prepare
from ttlaunch.app.report import Report
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_handle import Run
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.sinks import parse_sinks
from ttlaunch.app.spawn import spawn_supervisor
from ttlaunch.diagnostics import Diagnostic, LaunchError, file_error, render, shown, usage_error
from ttlaunch.diagnostics.html import facts_html, table_html, text_html
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.runs.facts import read_facts
from ttlaunch.running.runs.overview import RunSummary, list_runs
from ttlaunch.running.runs.registry import RegistryError, find_registry


class ClusterOptions(TypedDict, total=False):
    """Options that choose the cluster and the configuration, for `plan`, `validate`, `start` and `run`.

    Attributes:
        on: The name or the folder of a configuration.
        config: A training file in place of the recipe's own.
        set: Values by key, such as `{"training_config.steps": 20}`; or texts `KEY=VALUE`, as on the command line. A mapping as
            a value replaces the whole section, as it does there.
        ranks: The number of ranks, if the cluster's description leaves it open.
        hostfile: A hostfile in place of `on`.
        rank_bindings: Rank bindings in place of `on`.
        mpi_args: Further arguments for mpirun, as one text.
        engine: What starts the ranks: `agents` or `openmpi`; unless given, the program decides.
        args: Arguments of a script.
        elastic: The least and the most workers of a recipe, as `MIN:MAX`, while workers come and go.
        audit: The share of steps in which ranks check each other's gradients, such as `1/50`.
        naive: Whether ranks run the recipe's `naive.py`, which saves no checkpoints.
        independent: Whether each rank of a script is meant to train a model of its own.
        env: Variables for all ranks, such as `{"OMP_NUM_THREADS": "1"}`; or texts `NAME=VALUE`, and `NAME` for the value of
            this process.
        nproc_per_node: The number of ranks on each host, as torchrun's option.
        nnodes: The number of hosts, as torchrun's option.
        standalone: Whether all ranks have to run on this machine, as torchrun's option.
        warm: Whether torch is imported once on each host, by a process of which the ranks are forks.
    """

    on: str | Path
    config: str | Path | None
    set: Mapping[str, object] | Sequence[str]
    ranks: int | None
    hostfile: str | Path | None
    rank_bindings: str | Path | None
    mpi_args: str | None
    engine: str | None
    args: Sequence[str]
    elastic: str
    audit: str
    naive: bool
    independent: bool
    env: Mapping[str, str] | Sequence[str]
    nproc_per_node: int | None
    nnodes: int | None
    standalone: bool
    warm: bool


class StartOptions(ClusterOptions, total=False):
    """Further options of `start` and `run`, which control how the run is executed.

    Attributes:
        runs_dir: The folder in which run folders are made; `runs` unless given.
        resume: `latest`, a run or a path; the new run continues from its newest complete checkpoint.
        trace_steps: The number of steps to trace, from the first one on.
        profile_steps: Steps that torch's profiler records, such as `5-7`.
        grace: Seconds that ranks have to finish the current step and save a checkpoint after a request to stop; 30 unless given.
        hang_timeout: Seconds without progress of any rank after which the run counts as hung; unless given, ttlaunch derives it
            from the duration of steps.
        lease: Seconds after which ranks on another host end if they hear nothing from this machine; 15 unless given.
        share_with: A group whose members may read the run's folder; only the user can unless given.
        max_restarts: The most restarts from the newest checkpoint after a failure; 0 unless given.
        sinks: Sinks to which metrics are written besides the run's own log, such as `tensorboard=DIR`.
        coordinator: With `elastic`, the address of this machine, `HOST:PORT`, at which the run takes workers of other machines;
            `ttlaunch workers --invite` invites them.
    """

    runs_dir: str | Path
    resume: str | Path | None
    trace_steps: int | None
    profile_steps: str | None
    grace: float
    hang_timeout: float | None
    lease: float
    share_with: str | None
    max_restarts: int
    sinks: Sequence[str]
    coordinator: str | None


_CLUSTER_OPTIONS = tuple(ClusterOptions.__annotations__)
_START_OPTIONS = tuple(StartOptions.__annotations__)


@dataclass(frozen=True)
class Validation:
    """The result of checking a cluster's description, and a recipe on it if one was named.

    Attributes:
        ok: Whether a run can be planned.
        diagnostics: Errors, warnings and notes, in the order in which the command line prints them.
        files: The files of the description that were read.
    """

    ok: bool
    diagnostics: tuple[Diagnostic, ...]
    files: tuple[str, ...]

    def raise_for_errors(self) -> None:
        """Raise the diagnostics as an error unless the description is consistent.

        Raises:
            LaunchError: The description is not consistent.
        """
        if not self.ok:
            raise LaunchError(self.diagnostics)

    def _repr_html_(self) -> str:
        """Show in a notebook whether the description is consistent, and its diagnostics."""
        return facts_html({"consistent": "yes" if self.ok else "no"}) + text_html(render(self.diagnostics))


class Runs(list[RunSummary]):
    """A list of runs, oldest first."""

    def _repr_html_(self) -> str:
        """Show a table in a notebook, with a row for each run."""
        rows = [(one.folder.name, one.state, one.step, one.loss, one.ranks, one.name) for one in self]
        return table_html(("run", "state", "step", "loss", "ranks", "name"), rows)


def validate(target: Target | None = None, **options: Unpack[ClusterOptions]) -> Validation:
    """Read and check a cluster's description, and a recipe on it if one is named; nothing is started or written.

    Mistakes are the result, not an exception.
    """
    refuse_strangers("validate", options, _CLUSTER_OPTIONS)
    try:
        with _readable():
            spec = spec_of(target, checked_options(options))
            found = resolve(
                spec,
            )
    except LaunchError as error:
        return Validation(ok=False, diagnostics=error.diagnostics, files=())
    return Validation(found.ok, tuple(found.diagnostics), tuple(found.files))


def plan(target: Target, **options: Unpack[ClusterOptions]) -> LaunchPlan:
    """Plan a run rank by rank, without starting it.

    Raises:
        LaunchError: The options, the description, the recipe or its configuration has a mistake.
    """
    refuse_strangers("plan", options, _CLUSTER_OPTIONS)
    with _readable():
        return prepare(_target_spec(target, checked_options(options)), Unattended()).plan


def start(target: Target, *, detach: bool = False, **options: Unpack[StartOptions]) -> Run:
    """Check everything, start a run, and return as soon as the run has begun.

    A separate process supervises the run. If the calling process ends for any reason, the run ends too, unless it is detached.

    Args:
        target: The program of the ranks: a recipe, a script or a program's command line.
        detach: Whether the run continues when this process ends; `ttlaunch.attach` finds it again.
        options: The options of the command line; see `ClusterOptions` and `StartOptions`.

    Raises:
        LaunchError: There is a mistake, or a host is not ready; nothing was started.
    """
    refuse_strangers("start", options, _START_OPTIONS)
    _refuse_within_a_rank()
    marks = (("checks", time.time()),)
    given, dialogue = checked_options(options), Unattended()
    with _readable():
        spec = _target_spec(target, given)
        asked = parse_sinks(given.get("sinks", ()), option="--sink")
        prepared = _prepare_with_states(spec, dialogue)
    check_coordinator(given.get("coordinator"), prepared)
    how = RunOptions(
        runs_dir=spec.runs_dir,
        grace_s=given.get("grace", 30.0),
        hang_timeout_s=given.get("hang_timeout"),
        lease_s=given.get("lease", contract.LEASE_S),
        share_with=group_id(given["share_with"]) if "share_with" in given else None,
        marks=marks,
        coordinator=given.get("coordinator"),
    )
    most = given.get("max_restarts", 0)
    supervisor = spawn_supervisor(
        spec, how, plan_hash=prepared.plan.hash, max_restarts=most, sinks=asked, detach=bool(detach)
    )
    try:
        folder = supervisor.wait_for_run()
    except BaseException:  # such as Ctrl-C: without a handle, nobody could end the run
        supervisor.end()
        raise
    return Run(folder, supervisor=supervisor, warnings=dialogue.warnings, detached=detach)


def _target_spec(target: Target | None, given: Mapping[str, Any]) -> RunSpec:
    """Return the specification of a call that needs a target.

    Raises:
        LaunchError: The call has no target.
    """
    if target is None:
        raise no_target("a recipe, a script or a program's command line")
    return spec_of(target, given)


def run(target: Target, **options: Unpack[StartOptions]) -> Report:
    """Check everything, start a run, wait until it ends and return its report; Ctrl-C ends it as `Run.stop` does.

    Raises:
        LaunchError: There is a mistake or a host is not ready, so nothing was started; or the supervisor was killed.
    """
    with start(target, **options) as begun:
        return begun.wait()


def attach(run: str | Path = "latest", *, runs_dir: str | Path = "runs") -> Run:
    """Return a run that was started earlier, by this or another program or from the command line; it may have ended.

    Args:
        run: `latest`, a run's id or a part of it, or a path.
        runs_dir: The folder that contains the run folders.

    Raises:
        LaunchError: No run or several runs match, or the run was started on another machine and is still running there.
    """
    named, place = checked_options({"resume": run, "runs_dir": runs_dir}).values()
    if not named:
        raise usage_error("an empty text names no run", code="P030")
    with _readable():
        folder = find_named_run(named, runs_dir=Path(place))
        launcher = read_launcher_here(folder, "attach")
    try:
        read_facts(folder)
    except (OSError, ValueError) as error:
        raise unreadable_run(folder, error) from error
    return Run(folder, launcher=launcher, detached=True)


def runs(*, runs_dir: str | Path = "runs", every: bool = True) -> Runs:
    """List this user's runs on this machine: the registered ones, and those in a folder of runs.

    Args:
        runs_dir: The folder of runs.
        every: Whether to list runs that have ended, too.

    Raises:
        LaunchError: The folder cannot be read.
    """
    place = checked_options({"runs_dir": runs_dir})["runs_dir"]
    try:
        registry = find_registry(os.environ)
    except RegistryError:
        registry = None
    with _readable():
        found, _ = list_runs(Path.cwd() / place, registry)
    return Runs(one for one in found if every or not one.is_over)


def _prepare_with_states(spec: RunSpec, dialogue: Dialogue) -> PreparedRun:
    """Prepare a run to be started, after what the workers of a lost run saved was collected if the run resumes from it."""
    if spec.resume is not None:
        from ttlaunch.app.collect_states import collect_states

        collect_states(spec, dialogue)
    return prepare(spec, dialogue)


@contextmanager
def _readable() -> Iterator[None]:
    """Turn an error of the operating system while files are read, such as a name that is too long, into a diagnostic.

    Raises:
        LaunchError: Raised in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise file_error(error.filename or "the current folder", error, verb="read") from error


def _refuse_within_a_rank() -> None:
    """Refuse to start a run from a rank: each rank of the run would start one.

    Raises:
        LaunchError: This process is a rank of a run.
    """
    rank, run_id = os.environ.get(contract.ENV_RANK), os.environ.get(contract.ENV_RUN_ID)
    if rank is None:
        return
    message = f"this process is rank {shown(rank)} of the run {shown(str(run_id))}, and a rank starts no runs"
    hints = ("start the run from the program that you start yourself, not from a trainer",)
    raise usage_error(message, *hints, code="P049")
