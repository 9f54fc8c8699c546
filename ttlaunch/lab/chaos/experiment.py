"""Inject faults into a run: choose them, execute the run, and look for leftovers afterwards."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.execute import RunOptions, StartingRun, execute_plan
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.prepare_run import PreparedRun
from ttlaunch.app.reach import open_transports, reach_hosts
from ttlaunch.diagnostics import LaunchError, Source, file_error, has_errors, usage_error
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.lab.chaos.audit import Leftovers, audit
from ttlaunch.lab.chaos.inject import Injector
from ttlaunch.planning.fault_checks import FaultScope, check_faults, scope_of
from ttlaunch.planning.fault_parser import parse_faults
from ttlaunch.planning.faults import FLIPS, AtSecond, AtStep, Fault, Kind, Target, Verb
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.running.logs.output import View
from ttlaunch.running.runs.run_folder import RunFolder

_FILE = "@"

MakesView = Callable[["LaunchPlan", "RunFolder"], "AbstractContextManager[View]"]
"""Makes a view of a run from its plan and folder."""


def fault_source(faults: str | None, random: int | None) -> Source | None:
    """Return the text of the plan of faults; None if faults are to be drawn at random.

    Args:
        faults: The value of `--plan`: a plan of faults, or `@FILE`; None without the option.
        random: The value of `--random`: how many faults to draw; None without the option.

    Raises:
        LaunchError: Both are given or neither, or the file cannot be read.
    """
    hint = '`--plan "kill rank=2 at step=5"` orders a fault, `--random 1` draws one'
    if faults is not None and random is not None:
        raise usage_error("faults are ordered by `--plan` and drawn by `--random`", hint, code="P039")
    if faults is None:
        if random is None:
            raise usage_error("no fault is ordered", hint, code="P039")
        return None
    if not faults.startswith(_FILE):
        return Source("--plan", faults)
    path = Path(faults.removeprefix(_FILE))
    try:
        return Source(str(path), path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        message = f"{path} is no plan of faults: it is not text in UTF-8"
        raise usage_error(message, hint, code="P039") from error
    except OSError as error:
        raise file_error(path, error, verb="read") from error


def find_faults(source: Source | None, prepared: "PreparedRun", *, count: int | None, seed: int) -> "list[Fault]":
    """Choose the faults to inject into a run.

    Args:
        source: The text of the plan of faults; None draws `count` faults.
        prepared: The run.
        count: How many faults to draw.
        seed: The seed of the draw.

    Raises:
        LaunchError: The plan has a mistake, or one of its faults is not possible in this run.
    """
    scope = scope_of(prepared.plan, is_here=prepared.is_here)
    if source is None:
        return draw_faults(scope, count=count or 0, seed=seed)
    faults, found = parse_faults(source)
    found += check_faults(faults, scope)
    if has_errors(found):
        raise LaunchError(found)
    return faults


def break_run(
    prepared: PreparedRun, options: RunOptions, faults: Sequence[Fault], *, dialogue: Dialogue, show: MakesView
) -> Outcome:
    """Execute a plan in this process and inject the faults.

    Raises:
        LaunchError: A host is not ready; nothing was started.
    """
    transports: Sequence[Transport] = []
    if not prepared.is_here and any(fault.target.kind in {Kind.SHIM, Kind.AGENT} for fault in faults):
        hosts = [host for host in prepared.topology.hosts if host.name in prepared.plan.hosts]
        transports = reach_hosts(replace(prepared.topology, hosts=tuple(hosts)), dialogue)
    elsewhere = {transport.host: transport for transport in transports}

    @contextmanager
    def injecting(run: StartingRun) -> Iterator[View]:
        with show(run.plan, run.folder) as view:
            yield Injector(
                faults,
                view=view,
                controller=run.controller,
                folder=run.folder,
                scratch=run.scratch,
                elsewhere=elsewhere,
            )

    try:
        return execute_plan(with_flips(prepared, faults), options, dialogue, watched_by=injecting)
    finally:
        for transport in transports:
            transport.close()


def with_flips(prepared: PreparedRun, faults: Sequence[Fault]) -> PreparedRun:
    """Order ranks to flip a bit after a step, by a variable: only a rank itself knows where its tensors are."""
    flips = {
        fault.target.value: f"{fault.verb} {fault.moment.step}"
        for fault in faults
        if fault.verb in FLIPS and isinstance(fault.moment, AtStep)
    }
    if not flips:
        return prepared
    rows = [
        replace(row, environment={**row.environment, contract.ENV_FLIP: flips[row.rank]}) if row.rank in flips else row
        for row in prepared.plan.ranks
    ]
    return replace(prepared, plan=replace(prepared.plan, ranks=tuple(rows)))


def look_for_leftovers(
    outcome: Outcome, prepared: "PreparedRun", *, began: float, lease_s: float
) -> "Sequence[Leftovers]":
    """Look for leftovers of a run on all its hosts, over new connections.

    Args:
        outcome: The outcome of a run that was executed in this process.
        prepared: The plan and options of that run.
        began: When the run began, seconds since the epoch.
        lease_s: How long ranks may continue on a host that has lost the launcher.
    """
    transports: Sequence[Transport] = []
    if not prepared.is_here:
        hosts = [host for host in prepared.topology.hosts if host.name in prepared.plan.hosts]
        transports, _ = open_transports(replace(prepared.topology, hosts=tuple(hosts)))
    assert outcome.scratch is not None  # noqa: S101 - the run was executed here
    patience_s = lease_s + contract.AFTER_LEASE_S
    try:
        return audit(
            outcome.folder.run_id,
            outcome.scratch,
            transports,
            names=prepared.plan.engine.names,
            began=began,
            patience_s=patience_s,
        )
    finally:
        for transport in transports:
            transport.close()


_LATEST_MS = 10_000


def draw_faults(scope: FaultScope, *, count: int, seed: int) -> list[Fault]:
    """Draw faults, sorted by their moments; kind, target and moment of each are drawn with equal probabilities.

    Args:
        scope: The possible targets and moments. If the last step is known, moments are earlier steps, otherwise seconds.
        count: How many faults to draw.
        seed: Equal seeds draw equal faults.
    """
    generator = random.Random(f"faults {seed}")  # noqa: S311 - nothing secret
    rows, hosts = [row for row in scope.ranks if not row.later], scope.hosts
    kinds = [(verb, Kind.RANK) for verb in (Verb.KILL, Verb.STOP, Verb.TERM, Verb.SEGV)]
    kinds += [(Verb.KILL, Kind.SHIM), (Verb.KILL, Kind.ENGINE), (Verb.INTERRUPT, Kind.RUN)]
    if not scope.is_here:
        kinds += [(Verb.KILL, Kind.AGENT), (Verb.CUT, Kind.HOST)]
    if scope.is_elastic:
        kinds += [(Verb.JOIN, Kind.RUN), (Verb.LEAVE, Kind.RANK)]
    drawn = []
    for _ in range(count):
        verb, kind = generator.choice(kinds)
        value: int | str = ""
        if kind in {Kind.RANK, Kind.SHIM}:
            value = generator.choice(rows).rank
        elif kind in {Kind.AGENT, Kind.HOST}:
            value = generator.choice(hosts)
        drawn.append((verb, Target(kind, value)))
    moments = sorted(_draw_moment(scope, generator) for _ in range(count))
    steps = _has_steps(scope)
    return [
        Fault(verb, target, AtStep(moment) if steps else AtSecond(moment))
        for (verb, target), moment in zip(drawn, moments, strict=True)
    ]


def _has_steps(scope: FaultScope) -> bool:
    return scope.takes_steps and scope.last_step is not None and (scope.first_step or 1) < scope.last_step


def _draw_moment(scope: FaultScope, generator: random.Random) -> int:
    if not _has_steps(scope) or scope.last_step is None:
        return generator.randrange(1, _LATEST_MS // 100) * 100
    return generator.randrange(scope.first_step or 1, scope.last_step)
