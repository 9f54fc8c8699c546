"""Choose how to divide a training: simulate every form of it that a cluster can run, and rank them by the time of a step.

Every form trains the same global batch in a step, so the time of a step compares them. It is that of the virtual clock
(`lab/virtual.py`). Memory is predicted (`app/predict.py`) from the quickest form on, until as many fit as are wanted.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ttlaunch.app.calibrate import predict_time
from ttlaunch.app.dialogue import Dialogue, Unattended
from ttlaunch.app.fits import needed_by_host
from ttlaunch.app.predict import NotPredicted, predict
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import LOCAL, RunSpec
from ttlaunch.app.training_file import read_training
from ttlaunch.diagnostics import Diagnostic, LaunchError, has_errors, usage_error
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, StepTime, VirtualRun, check_conditions, run_each_virtually
from ttlaunch.planning.forms import Form, as_options, excluded, forms_of, same_bits, shared, sizes_of, steps_of
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.running.metrics.prediction import Prediction, process_bytes
from ttlaunch.spec.named_folders import NamedFolder
from ttlaunch.spec.recipe.config import load_config
from ttlaunch.spec.recipe.declare import Recipe
from ttlaunch.spec.recipe.discovery import find_recipe, list_recipes, load_recipe
from ttlaunch.spec.recipe.sections import ConfigFile
from ttlaunch.spec.topology.model import Topology

FIRST = "data_parallel"
"""The recipe whose training file is read if the command names no recipe."""

_STEPS = 2
"""How many steps count, if the form makes the same in each; the first one does not, in which nothing of a step before it arrives."""

Orders = Sequence[tuple[LaunchPlan, Conditions]]
Simulates = Callable[..., list[VirtualRun | LaunchError]]
Predicts = Callable[[LaunchPlan], Prediction | NotPredicted]
Done = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Excess:
    """A host whose ranks do not fit, and the rank on it that takes most."""

    host: str
    rank: int
    needed: int
    limit: int

    @property
    def bytes(self) -> int:
        return self.needed - self.limit

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "bytes": self.bytes}


@dataclass(frozen=True)
class Advice:
    """One form of the training, and what was predicted of it.

    Attributes:
        command: What starts it, as it can be pasted into a shell.
        found: The simulation.
        slowest: Those ranks of it whose steps take longest.
        has_same_bits: Whether it ends with the bits of the training as it is described.
        fits: Whether each host has room for its ranks; None if that was not predicted.
        excess: If it does not fit, where.
        needed: The bytes that the ranks of each host take; empty if they were not predicted.
        not_predicted: Why not, as a clause.
    """

    form: Form
    layout: str
    command: str
    found: VirtualRun
    slowest: StepTime
    has_same_bits: bool
    fits: bool | None = None
    excess: Excess | None = None
    needed: Mapping[str, int] = field(default_factory=dict)
    not_predicted: str | None = None

    @property
    def batch(self) -> int:
        training = self.found.plan.as_json()["config"]["training_config"]
        return int(training["batch_size"] * training["gradient_accumulation_steps"])

    @property
    def terms(self) -> dict[str, float]:
        """Return the parts of the slowest rank's step, in milliseconds; what pipelines wait for is their bubble."""
        stages = "stage" in {row.role for row in self.found.plan.ranks}
        one = self.slowest
        return {
            "computing": one.computing_ms,
            "communication": one.exposed_ms,
            "bubble" if stages else "waiting": one.waiting_ms,
        }

    @property
    def dominant(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def why(self) -> str:
        """Say in a clause why it stands where it stands."""
        if self.excess is not None:
            over = self.excess
            return f"does not fit by {over.bytes:,} bytes on rank {over.rank} of {over.host}"
        return f"{self.dominant} takes {self.terms[self.dominant] / max(self.slowest.step_ms, 1e-12):.0%} of the step"

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.form.recipe,
            "layout": self.layout,
            "ranks": self.form.ranks,
            "values": list(self.form.values),
            "command": self.command,
            "step_ms": self.slowest.step_ms,
            "sequences_per_s": self.batch / self.slowest.step_ms * 1e3,
            "terms": self.terms,
            "dominant": self.dominant,
            "why": self.why,
            "same_bits": self.has_same_bits,
            "fits": self.fits,
            "needed_bytes": dict(self.needed),
            "excess": None if self.excess is None else self.excess.as_json(),
            "not_predicted": self.not_predicted,
        }


@dataclass(frozen=True)
class Refused:
    """A form, or all forms of a recipe, that cannot run, with the reason as a clause."""

    recipe: str
    ranks: int | None
    values: tuple[str, ...]
    reason: str

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "values": list(self.values)}


@dataclass(frozen=True)
class Ranking:
    """All forms of a training on a cluster.

    Attributes:
        recipe: The one whose training file was read.
        ranked: Those that can run, the quickest first; those that do not fit behind all others.
        refused: Those that cannot.
    """

    recipe: str
    topology: str
    conditions: Conditions
    ranked: tuple[Advice, ...]
    refused: tuple[Refused, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "topology": self.topology,
            "conditions": self.conditions.as_json(),
            "ranked": [one.as_json() for one in self.ranked],
            "refused": [one.as_json() for one in self.refused],
        }


def advise(
    spec: RunSpec,
    conditions: Conditions,
    dialogue: Dialogue,
    *,
    top: int = 5,
    limits: Mapping[str, int] | None = None,
    only_same_bits: bool = False,
    simulate: Simulates = run_each_virtually,
    foresee: Predicts = predict,
    done: Done = lambda _what, _count, _of: None,
) -> Ranking:
    """Rank all forms of a training on a cluster.

    Args:
        spec: The training: a recipe, its file, and the cluster.
        conditions: What the machines and their network are like.
        dialogue: Gets warnings.
        top: For how many forms that fit memory is predicted.
        limits: The bytes of each host; the key `""` is for hosts that are not named. None: memory is not considered.
        only_same_bits: Whether forms with other bits than the training's are refused.
        simulate: Runs plans on virtual clocks.
        foresee: Predicts the memory of a plan.
        done: Is called with what is done, how many of it, and of how many.

    Raises:
        LaunchError: The cluster or the training has a mistake, or no form can run.
    """
    topology = _topology(spec, dialogue)
    _check_hosts(topology, limits or {})
    base, recipe, training = _training(spec, dialogue)
    context = _Context(topology, conditions, dialogue, done)
    planned, refused = _plans(spec, base, training, context=context)
    has_bits = same_bits(recipe, training)

    def bits_of(one: _Planned) -> bool:
        is_now = one.form.recipe == base.name and one.config.model_dump() == training.model_dump()
        return is_now or (one.has_bits_of_one and has_bits)

    if only_same_bits:
        refused += [_refused(one, "its bits are not those of the training") for one in planned if not bits_of(one)]
        planned = [one for one in planned if bits_of(one)]
    runs = simulate(
        [(one.plan, one.conditions) for one in planned], done=lambda n: done("forms simulated", n, len(planned))
    )
    found, failed = _advice(planned, runs, bits_of)
    refused += failed
    if not found:
        raise _nothing_runs(refused)
    if limits is not None:
        found = _fitting(found, limits, top=top, foresee=foresee, done=done)
    return Ranking(base.name, topology.name, conditions, tuple(found), tuple(refused))


@dataclass(frozen=True)
class _Planned:
    form: Form
    layout: str
    command: str
    plan: LaunchPlan
    conditions: Conditions
    config: ConfigFile
    has_bits_of_one: bool


def _advice(
    planned: Sequence[_Planned], runs: Sequence[VirtualRun | LaunchError], bits_of: Callable[[_Planned], bool]
) -> tuple[list[Advice], list[Refused]]:
    found: list[Advice] = []
    refused: list[Refused] = []
    for one, run in zip(planned, runs, strict=True):
        slowest = None if isinstance(run, LaunchError) else run.slowest
        if isinstance(run, LaunchError) or slowest is None:
            reason = run.diagnostics[0].message if isinstance(run, LaunchError) else "no rank counts steps"
            refused.append(_refused(one, reason))
            continue
        found.append(Advice(one.form, one.layout, one.command, run, slowest, bits_of(one)))
    return sorted(found, key=lambda one: (one.slowest.step_ms, one.form.ranks)), refused


def _refused(one: _Planned, reason: str) -> Refused:
    return Refused(one.form.recipe, one.form.ranks, one.form.values, reason)


def _topology(spec: RunSpec, dialogue: Dialogue) -> Topology:
    found = resolve(replace(spec, target=None, ranks=None, overrides=(), config_file=None), dialogue=dialogue)
    if not found.ok or found.topology is None:
        raise LaunchError(found.diagnostics)
    dialogue.warn(found.diagnostics)
    return found.topology


def _check_hosts(topology: Topology, limits: Mapping[str, int]) -> None:
    hosts = [str(host.name) for host in topology.hosts]
    for name in limits:
        if name and name not in hosts:
            raise usage_error(f"`--fits {name}=…` names no host of `{topology.name}`", f"it has {', '.join(hosts[:8])}")


def _training(spec: RunSpec, dialogue: Dialogue) -> tuple[NamedFolder, Recipe, ConfigFile]:
    """Read the training: with the recipe that is named, else with the first one that knows all sections of its file.

    Raises:
        LaunchError: It has a mistake.
    """
    is_open = spec.target is None and spec.config_file not in (None, "-")
    names = [spec.target or FIRST, *(one.name for one in list_recipes(Path.cwd()) if is_open)]
    mistakes: list[Diagnostic] = []
    for name in names:
        found = find_recipe(name, working_folder=Path.cwd())
        with dialogue.recipe_code():
            recipe = found if isinstance(found, Diagnostic) else load_recipe(found)
        if isinstance(found, Diagnostic) or isinstance(recipe, Diagnostic):
            mistakes = mistakes or [recipe if isinstance(recipe, Diagnostic) else found]  # type: ignore[list-item]
            continue
        loaded = read_training(spec, recipe, found)
        if loaded.config is not None and not has_errors(loaded.diagnostics):
            why = excluded(recipe, loaded.config)
            if why is not None:
                raise usage_error(f"`advise` compares trainings, and {found.name} is none: {why}")
            dialogue.warn(loaded.diagnostics)
            return found, recipe, loaded.config
        mistakes = mistakes or list(loaded.diagnostics)
    raise LaunchError(mistakes)


@dataclass(frozen=True)
class _Context:
    topology: Topology
    conditions: Conditions
    dialogue: Dialogue
    done: Done


def _plans(
    spec: RunSpec, base: NamedFolder, training: ConfigFile, *, context: _Context
) -> tuple[list[_Planned], list[Refused]]:
    topology = context.topology
    slots = topology.world_size or len(topology.slots)
    sizes = [slots] if topology.world_size else [spec.ranks] if spec.ranks else sizes_of(slots)
    check_conditions(context.conditions, world_size=max(sizes))
    planned: list[_Planned] = []
    refused: list[Refused] = []
    folders = [base, *(one for one in list_recipes(Path.cwd()) if one.name != base.name)]
    for place, folder in enumerate(folders):
        context.done("recipes planned", place, len(folders))
        with context.dialogue.recipe_code():
            recipe = load_recipe(folder)
        why = recipe.message if isinstance(recipe, Diagnostic) else excluded(recipe, training)
        if why is not None or isinstance(recipe, Diagnostic):
            refused.append(Refused(folder.name, None, (), why or ""))
            continue
        for form in forms_of(folder.name, recipe, training, sizes=sizes, slots=max(slots, *sizes), alone=place == 0):
            one = _plan(spec, training, folder=folder, recipe=recipe, form=form, conditions=context.conditions)
            if isinstance(one, str):
                refused.append(Refused(form.recipe, form.ranks, form.values, one))
            else:
                planned.append(one)
    return planned, refused


def _plan(
    spec: RunSpec, training: ConfigFile, *, folder: NamedFolder, recipe: Recipe, form: Form, conditions: Conditions
) -> _Planned | str:
    """Plan a form; return why it cannot be planned, as a clause."""
    wanted = shared(recipe, training, form.values)
    if wanted.config is None or has_errors(wanted.diagnostics):
        return wanted.diagnostics[0].message
    own = load_config(recipe, folder.train_file if folder.train_file.is_file() else None)
    if own.config is None:
        return own.diagnostics[0].message
    values = as_options(wanted.config, own.config, unread=recipe.unread)
    of_file = [replace(spec, overrides=(*spec.overrides, *form.values))] if spec.config_file not in (None, "-") else []
    target = folder.name if folder.folder.name == folder.name else str(folder.folder)
    reason = ""
    for attempt in (*of_file, replace(spec, config_file=None, overrides=values)):
        asked = replace(attempt, target=target, ranks=form.ranks)
        try:
            plan = plan_simulation(asked, Unattended())
        except LaunchError as error:
            reason = error.diagnostics[0].message
            continue
        if dict(plan.as_json()["config"]) != wanted.config.model_dump(mode="json"):
            reason = "its file gives other values"
            continue
        layout = str(plan.as_json()["layout"])
        under = _under(conditions, wanted.config, plan.world_size)
        bits = same_bits(recipe, wanted.config)
        return _Planned(form, layout, _command(asked), plan, under, wanted.config, bits)
    return reason


def _under(conditions: Conditions, config: ConfigFile, world_size: int) -> Conditions:
    """Return the conditions of a form: as many steps as show what one takes, and the slow ranks that it has."""
    warm_up = steps_of(config, least=1)
    return replace(
        conditions,
        steps=warm_up + steps_of(config, least=_STEPS),
        warm_up=warm_up,
        slow=_of_ranks(conditions.slow, world_size),
        slow_link=_of_ranks(conditions.slow_link, world_size),
    )


def _of_ranks(factors: Mapping[int, float], count: int) -> dict[int, float]:
    """Leave out ranks that a form does not have."""
    return {rank: factor for rank, factor in factors.items() if rank < count}


def _command(spec: RunSpec) -> str:
    """Return the command line of a run, as it can be pasted into a shell."""
    words = ["ttlaunch", "run", str(spec.target)]
    words += ["--on", spec.on] if spec.on != LOCAL else []
    words += ["--hostfile", str(spec.hostfile)] if spec.hostfile else []
    words += ["--rank-bindings", str(spec.rank_bindings)] if spec.rank_bindings else []
    words += ["-c", spec.config_file] if spec.config_file else []
    words += ["--ranks", str(spec.ranks)]
    return shlex.join([*words, *(word for one in spec.overrides for word in ("--set", one))])


def _nothing_runs(refused: Sequence[Refused]) -> LaunchError:
    reasons = dict.fromkeys(f"{one.recipe}: {one.reason}" for one in refused)
    error = usage_error("no recipe can train this on this cluster", *list(reasons)[:3])
    return LaunchError(error.diagnostics, status=3)


def _fitting(
    found: Sequence[Advice], limits: Mapping[str, int], *, top: int, foresee: Predicts, done: Done
) -> list[Advice]:
    """Predict the memory of the quickest forms until so many fit; those that do not fit come last."""
    fitting: list[Advice] = []
    others: list[Advice] = []
    unknown = list(found)
    while unknown and len(fitting) < top:
        one = _judged(unknown.pop(0), limits, foresee)
        (others if one.fits is False else fitting).append(one)
        done("memory predicted", len(fitting), top)
    return [*fitting, *unknown, *others]


def _judged(one: Advice, limits: Mapping[str, int], foresee: Predicts) -> Advice:
    prediction = foresee(one.found.plan)
    if isinstance(prediction, NotPredicted):
        return replace(one, not_predicted=prediction.reason)
    hosts = [row.host for row in one.found.plan.ranks]
    needed = needed_by_host(prediction, hosts)
    over = [
        Excess(host, _largest(prediction, hosts, host), size, limit)
        for host, size in needed.items()
        if (limit := limits.get(host, limits.get("", size))) < size
    ]
    worst = max(over, key=lambda excess: excess.bytes, default=None)
    return replace(one, fits=worst is None, excess=worst, needed=needed)


def _largest(prediction: Prediction, hosts: Sequence[str], host: str) -> int:
    there: Iterator[int] = (rank for rank, name in enumerate(hosts) if name == host)
    return max(there, key=lambda rank: process_bytes(prediction, prediction.ranks[rank]))


def measured_ms(spec: RunSpec, dialogue: Dialogue) -> float:
    """Return how long a micro-batch takes on one rank of this machine, by a calibration that is kept, or a new one of at most 10 s.

    Raises:
        LaunchError: The training has a mistake, or it cannot be calibrated here.
    """
    base, recipe, training = _training(spec, dialogue)
    form = Form(base.name, 1, ())
    alone = replace(spec, on=LOCAL, hostfile=None, rank_bindings=None)
    one = _plan(alone, training, folder=base, recipe=recipe, form=form, conditions=Conditions())
    found = NotPredicted(one) if isinstance(one, str) else predict_time(one.plan, anew=False)
    if isinstance(found, NotPredicted):
        raise usage_error(f"`--calibrate` was given, and the time of a micro-batch cannot be measured: {found.reason}")
    [rank], [kept] = found.ranks, found.kept.ranks
    return 1e3 * (rank.phases["forward"].median + rank.phases["backward"].median) / max(1, kept.passes)
