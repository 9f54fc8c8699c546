"""What `import ttlaunch` offers: the use cases of the command line as functions.

None of them prints, ends the process, changes a signal handler, the environment or the working folder. What is wrong with
an order raises `LaunchError`, whose diagnostics are those that the command line prints. A run that failed is a `Report`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from ttlaunch import contract
from ttlaunch.app.carry_out import RunOptions
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.named_run import find_named_run, read_launcher_here, unreadable_run
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.report import Report
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_handle import Run
from ttlaunch.app.run_spec import LOCAL, RunSpec
from ttlaunch.app.sinks import parse_sinks
from ttlaunch.app.spawn import spawn_supervisor
from ttlaunch.diagnostics import Blame, Diagnostic, render, shown
from ttlaunch.diagnostics.html import facts_html, table_html, text_html
from ttlaunch.diagnostics.launch_error import LaunchError
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.running.runs.facts import read_facts
from ttlaunch.running.runs.overview import RunSummary, list_runs
from ttlaunch.running.runs.registry import RegistryError, find_registry

Target = str | Path | Sequence[str]
"""A recipe's name, a recipe's folder, a script; or, as a sequence, any program's command line."""

_LEAST = {"ranks": 1, "trace_steps": 1, "max_restarts": 0, "grace": 0, "lease": 3, "hang_timeout": 1}
"""The least value of each option that is a number, as on the command line."""

_WHOLE = {"ranks", "trace_steps", "max_restarts"}


class ClusterOptions(TypedDict, total=False):
    """Where and with what: the options that `plan`, `validate`, `start` and `run` share.

    Attributes:
        on: A configuration's name or folder.
        config: A training file in place of the recipe's own.
        set: Values by key, such as `{"training_config.steps": 20}`; or texts `KEY=VALUE`, as on the command line.
        ranks: World size, where the cluster leaves it open.
        hostfile: A hostfile in place of `on`.
        rank_bindings: Rank bindings in place of `on`.
        mpi_args: Words for mpirun.
        args: Arguments of a script.
    """

    on: str | Path
    config: str | Path | None
    set: Mapping[str, object] | Sequence[str]
    ranks: int | None
    hostfile: str | Path | None
    rank_bindings: str | Path | None
    mpi_args: str | None
    args: Sequence[str]


class StartOptions(ClusterOptions, total=False):
    """How: further options of `start` and `run`.

    Attributes:
        runs_dir: Where run folders are made; `runs` unless given.
        resume: `latest`, a run or a path: go on from its newest whole checkpoint.
        trace_steps: So many first steps are traced.
        profile_steps: Steps that torch's profiler records, such as `5-7`.
        grace: Seconds that ranks have to finish their step and save it when the end is ordered; 30 unless given.
        hang_timeout: Seconds without any movement after which the run has hung; unless given it follows from the steps.
        lease: Seconds for which ranks on another host run on when nothing is heard from here; 15 unless given.
        max_restarts: Start again from the newest checkpoint so often at the most; 0 unless given.
        sinks: Where metrics go besides the run's own log, such as `tensorboard=DIR`.
    """

    runs_dir: str | Path
    resume: str | Path | None
    trace_steps: int | None
    profile_steps: str | None
    grace: float
    hang_timeout: float | None
    lease: float
    max_restarts: int
    sinks: Sequence[str]


@dataclass(frozen=True)
class Validation:
    """What is to be said of a cluster's description, and of a recipe on it if one was named.

    Attributes:
        ok: Whether nothing keeps a run from being planned.
        diagnostics: Errors, warnings and notes, in the order of the command line.
        files: Of the description, those that were read.
    """

    ok: bool
    diagnostics: tuple[Diagnostic, ...]
    files: tuple[str, ...]

    def raise_for_errors(self) -> None:
        """Do nothing if it is consistent.

        Raises:
            LaunchError: It is not.
        """
        if not self.ok:
            raise LaunchError(self.diagnostics)

    def _repr_html_(self) -> str:
        """Whether it is consistent, and the diagnostics."""
        return facts_html({"consistent": "yes" if self.ok else "no"}) + text_html(render(self.diagnostics))


class Runs(list[RunSummary]):
    """Some runs, oldest first."""

    def _repr_html_(self) -> str:
        """A row for each."""
        rows = [(one.folder.name, one.state, one.step, one.loss, one.ranks, one.name) for one in self]
        return table_html(("run", "state", "step", "loss", "ranks", "name"), rows)


def validate(target: Target | None = None, **options: Unpack[ClusterOptions]) -> Validation:
    """Read and check a cluster's description, and a recipe on it if one is named; nothing is started or written.

    Mistakes are the result, not an exception.
    """
    try:
        spec = spec_of(target, options, {})
    except LaunchError as error:
        return Validation(ok=False, diagnostics=error.diagnostics, files=())
    found = resolve(spec, working_folder=Path.cwd(), shell=os.environ)
    return Validation(found.ok, tuple(found.diagnostics), tuple(found.files))


def plan(target: Target, **options: Unpack[ClusterOptions]) -> LaunchPlan:
    """Say what would be started, rank by rank; start nothing.

    Raises:
        LaunchError: Something is wrong with the order, the description, the recipe or its configuration.
    """
    return prepare(spec_of(target, options, {}), Unattended()).plan


def start(target: Target, *, detach: bool = False, **options: Unpack[StartOptions]) -> Run:
    """Check everything, start it, and return as soon as the run has begun.

    A supervisor, a process of its own, watches over it. If this process dies, whatever kills it, the run ends.

    Args:
        target: What ranks run.
        detach: The run goes on when this process ends; `ttlaunch.attach` finds it again.
        options: As on the command line; see `ClusterOptions` and `StartOptions`.

    Raises:
        LaunchError: Something is wrong, or a host is not ready; nothing was started.
    """
    _refuse_within_a_rank()
    spec, given = spec_of(target, options, options), options
    asked = parse_sinks(tuple(given.get("sinks", ())), option="--sink")
    dialogue = Unattended()
    prepared = prepare(spec, dialogue)
    how = RunOptions(
        runs_dir=spec.runs_dir,
        grace_s=given.get("grace", 30.0),
        hang_timeout_s=given.get("hang_timeout"),
        lease_s=given.get("lease", contract.LEASE_S),
    )
    supervisor = spawn_supervisor(
        spec,
        how,
        plan_hash=prepared.plan.hash,
        max_restarts=given.get("max_restarts", 0),
        sinks=asked,
        detach=detach,
    )
    folder = supervisor.wait_for_run()
    return Run(folder, supervisor=supervisor, warnings=dialogue.warnings, detached=detach)


def run(target: Target, **options: Unpack[StartOptions]) -> Report:
    """Check everything, start it, wait for its end and say what came out; Ctrl-C ends it as `Run.stop` does.

    Raises:
        LaunchError: Something is wrong, or a host is not ready; nothing was started. Or the supervisor was killed.
    """
    with start(target, **options) as begun:
        return begun.wait()


def attach(run: str | Path = "latest", *, runs_dir: str | Path = "runs") -> Run:
    """A run that was started elsewhere: by another program, by the command line, or before; also one that has ended.

    Args:
        run: `latest`, a run's id or a part of it, or a path.
        runs_dir: Where run folders are.

    Raises:
        LaunchError: There is none, several are meant, or it was started on another machine and goes on there.
    """
    folder = find_named_run(str(run), runs_dir=Path(runs_dir))
    launcher = read_launcher_here(folder, "attach")
    try:
        read_facts(folder)
    except (OSError, ValueError) as error:
        raise unreadable_run(folder, error) from error
    return Run(folder, launcher=launcher, detached=True)


def runs(*, runs_dir: str | Path = "runs", every: bool = True) -> Runs:
    """The runs of this user on this machine: those of the registry, and those in a folder of runs.

    Args:
        runs_dir: The folder.
        every: Also those that have ended.
    """
    try:
        registry = find_registry(os.environ)
    except RegistryError:
        registry = None
    found, _ = list_runs(Path.cwd() / runs_dir, registry)
    return Runs(one for one in found if every or not one.is_over)


def spec_of(target: Target | None, cluster: ClusterOptions, options: StartOptions) -> RunSpec:
    """The order as a use case takes it.

    Args:
        target: What ranks run; None: only the cluster is of interest.
        cluster: Options of `plan`.
        options: Further options of `start`.

    Raises:
        LaunchError: An option has a value that it cannot have.
    """
    mistakes = [*_wrong_numbers({**cluster, **options})]
    if target is not None and not isinstance(target, str | Path) and not target:
        mistakes.append(Diagnostic("P009", "the command line of the program is empty", blame=Blame.COMMAND_LINE))
    if mistakes:
        raise LaunchError(mistakes)
    words = [] if target is None or isinstance(target, str | Path) else [str(word) for word in target]
    config, resume = cluster.get("config"), options.get("resume")
    return RunSpec(
        target=words[0] if words else None if target is None else str(target),
        on=str(cluster.get("on", LOCAL)),
        config_file=None if config is None else str(config),
        overrides=_overrides(cluster.get("set", ())),
        ranks=cluster.get("ranks"),
        hostfile=_path(cluster.get("hostfile")),
        rank_bindings=_path(cluster.get("rank_bindings")),
        mpi_args=cluster.get("mpi_args"),
        arguments=(*words[1:], *(str(word) for word in cluster.get("args", ()))),
        resume=None if resume is None else str(resume),
        runs_dir=Path(options.get("runs_dir", "runs")),
        is_command=bool(words),
        trace_steps=options.get("trace_steps"),
        profile_steps=options.get("profile_steps"),
    )


def _wrong_numbers(options: Mapping[str, object]) -> list[Diagnostic]:
    found = []
    for name, least in _LEAST.items():
        value = options.get(name)
        kinds = int if name in _WHOLE else (int, float)
        if value is None or (isinstance(value, kinds) and not isinstance(value, bool) and value >= least):
            continue
        what = "a whole number" if name in _WHOLE else "a number"
        message = f"`{name}={shown(repr(value))}`: {what} of at least {least} was expected"
        found.append(Diagnostic("P009", message, blame=Blame.COMMAND_LINE))
    return found


def _overrides(given: Mapping[str, object] | Sequence[str]) -> tuple[str, ...]:
    """`KEY=VALUE` for each, as after `--set`, where values are YAML: a text stands in quotes if YAML would read it otherwise."""
    if not isinstance(given, Mapping):
        return tuple(given)
    return tuple(f"{key}={_yaml(value)}" for key, value in given.items())


def _yaml(value: object) -> str:
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        return json.dumps(value, default=str)
    import yaml

    try:
        is_plain = bool(value) and yaml.safe_load(value) == value
    except yaml.YAMLError:
        is_plain = False
    return value if is_plain else json.dumps(value)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _refuse_within_a_rank() -> None:
    """A rank that starts a run of its own would start one for each rank.

    Raises:
        LaunchError: This process is a rank of a run.
    """
    rank, run_id = os.environ.get(contract.ENV_RANK), os.environ.get(contract.ENV_RUN_ID)
    if rank is None:
        return
    message = f"this process is rank {shown(rank)} of the run {shown(str(run_id))}, and a rank starts no runs"
    hints = ("start the run from the program that you start yourself, not from a trainer",)
    raise LaunchError([Diagnostic("P049", message, hints=hints, blame=Blame.COMMAND_LINE)])
