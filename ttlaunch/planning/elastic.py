"""`--elastic MIN:MAX`: which recipes let workers come and go, and the rows of the plan for workers that replace others."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ttlaunch.diagnostics import Blame, Diagnostic, shown, usage_mistake
from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.suggest import listed
from ttlaunch.planning.launch_plan import ElasticLimits, LaunchPlan
from ttlaunch.planning.recipe_plan import RecipeChoice
from ttlaunch.spec.recipe.checks import every_worker_has_a_micro_batch
from ttlaunch.spec.recipe.config import LoadedConfig, override_config, value_of
from ttlaunch.spec.recipe.declare import Elastic, Per, Recipe

_OPTION = "--elastic"
_SOCKET = "multihost_config.socket_type"
_LIMITS = re.compile(r"([0-9]{1,6}):([0-9]{1,6})")
_EXAMPLE = "`--elastic 1:4` lets each step be made by one to four workers"
_MOST_REPLACEMENTS, _MOST_ROWS = 16, 256


@dataclass(frozen=True)
class Bounds:
    """The least and the most workers of a step, as `--elastic MIN:MAX` gives them."""

    minimum: int
    maximum: int


def parse_bounds(text: str) -> Bounds | Diagnostic:
    """Read the value of `--elastic`; a diagnostic if it is none."""
    found = _LIMITS.fullmatch(text)
    if found is None:
        return usage_mistake(f"`{_OPTION} {shown(text)}` is not MIN:MAX", _EXAMPLE)
    bounds = Bounds(int(found[1]), int(found[2]))
    if not 1 <= bounds.minimum <= bounds.maximum:
        rule = "MIN is at least 1" if not bounds.minimum else "MIN is at most MAX"
        return usage_mistake(f"`{_OPTION} {text}`: {rule}", _EXAMPLE)
    return bounds


def elastic_form(recipe: Recipe) -> Recipe:
    """Return the declaration of a recipe whose workers come and go: `MAX` has to fit the micro-batches, and more workers are spares."""
    form = recipe.in_elastic_form()
    if form.audited is not None:
        [role] = form.layouts[0].roles
        form = replace(form, audited=replace(form.audited, role=role))
    return replace(form, checks=[check for check in form.checks if check is not every_worker_has_a_micro_batch])


def over_grpc(recipe: Recipe, loaded: LoadedConfig) -> LoadedConfig:
    """Return the configuration with the transport that an elastic run needs, unless the user has chosen one."""
    if not isinstance(recipe.elastic, Elastic) or loaded.config is None or loaded.span(_SOCKET) is not None:
        return loaded
    return override_config(recipe, loaded, [f"{_SOCKET}=grpc"], option=_OPTION)


def refuse(name: str, recipe: Recipe, loaded: LoadedConfig, *, bounds: Bounds, ranks: int | None) -> list[Diagnostic]:
    """Return why the workers of a recipe cannot come and go within these bounds; nothing if they can.

    Args:
        name: The recipe's name.
        recipe: Its declaration.
        loaded: Its configuration, as `over_grpc` returns it.
        bounds: The value of `--elastic`.
        ranks: The number of workers that start with the run; None where it is not known.
    """
    if not isinstance(recipe.elastic, Elastic):
        why = f": {recipe.elastic}" if recipe.elastic else ""
        message = f"`{_OPTION}` lets workers come and go, and those of {name} have to stay{why}"
        return [_mistake(message, f"leave `{_OPTION}` out")]
    if loaded.config is None:
        return []
    only = {_SOCKET: "grpc", **recipe.elastic.only}
    found = [
        _wrong_value(name, key, loaded, only=values)
        for key, value in only.items()
        if value_of(loaded, key) not in (values := value if isinstance(value, tuple) else (value,))
    ]
    servers = _number(recipe.elastic.servers, loaded)
    return [*found, *_wrong_bounds(bounds, micro_batches=_micro_batches(loaded), servers=servers, ranks=ranks)]


def plan_replacements(plan: LaunchPlan, bounds: Bounds, choice: RecipeChoice) -> LaunchPlan | Diagnostic:
    """Return the plan with further rows, which start only in place of workers that have ended.

    A worker that replaces another one has a number of its own, and the host, the slot and the devices of the other.
    """
    form, loaded = choice.recipe.elastic, choice.loaded
    assert isinstance(form, Elastic)  # noqa: S101 - `refuse` has looked
    limits = ElasticLimits(
        bounds.minimum,
        bounds.maximum,
        _micro_batches(loaded),
        first=plan.world_size,
        slots=None if form.slots is None else _number(form.slots, loaded),
        servers=_number(form.servers, loaded),
        has_local_steps=form.has_local_steps,
        shadow_bytes=0 if form.shadow_bytes is None else form.shadow_bytes(loaded.checked),
        kept_bytes=form.kept_bytes(loaded.checked) if callable(form.kept_bytes) else form.kept_bytes,
    )
    if limits.first < limits.minimum:
        given = f"{_OPTION} {bounds.minimum}:{bounds.maximum}"
        message = f"`{given}`: the run starts with {limits.first} of at least {limits.minimum} workers"
        return _mistake(message, f"`--ranks {limits.minimum}`, or a smaller MIN")
    each = max(1, min(_MOST_REPLACEMENTS, _MOST_ROWS // limits.first))
    later = [
        replace(plan.ranks[number % limits.first], rank=number, later=True)
        for number in range(limits.first, limits.first * (1 + each))
    ]
    return replace(plan, ranks=(*plan.ranks, *later), elastic=limits)


def _wrong_bounds(bounds: Bounds, *, micro_batches: int, servers: int, ranks: int | None) -> Iterator[Diagnostic]:
    given = f"{_OPTION} {bounds.minimum}:{bounds.maximum}"
    most, least = micro_batches + servers, servers + 1
    if bounds.maximum > most:
        others = f" beside {counted(servers, 'server')}" if servers else ""
        message = f"`{given}`: a step has {_count(micro_batches)}, so at most as many workers make it{others}"
        accumulation = "`training_config.gradient_accumulation_steps` gives a step more of them"
        yield _mistake(message, f"`{_OPTION} {max(least, min(bounds.minimum, most))}:{most}`", accumulation)
    elif bounds.minimum < least:
        keep = f"{counted(servers, 'worker')} of a step {'keeps' if servers == 1 else 'keep'}"
        message = f"`{given}`: {keep} the optimizer's state, so it needs one more at least"
        yield _mistake(message, f"`{_OPTION} {least}:{max(least, bounds.maximum)}`")
    elif ranks is not None and ranks < bounds.minimum:
        message = f"`{given}`: the run starts with {counted(ranks, 'worker')}, fewer than MIN"
        yield _mistake(message, f"`--ranks {bounds.minimum}`, or a smaller MIN")


def _wrong_value(name: str, key: str, loaded: LoadedConfig, *, only: Sequence[object]) -> Diagnostic:
    values = ["null" if value is None else value for value in only]
    message = f"`{key}` is `{value_of(loaded, key)}`; workers of {name} come and go only with {listed(values)}"
    label = loaded.label(key, f"expected {listed(values)}")
    hint = f"`--set {key}={values[0]}`, or leave `{_OPTION}` out"
    return Diagnostic("P074", message, label, hints=(hint,), blame=Blame.COMMAND_LINE)


def _mistake(message: str, *hints: str) -> Diagnostic:
    return Diagnostic("P074", message, hints=hints, blame=Blame.COMMAND_LINE)


def _micro_batches(loaded: LoadedConfig) -> int:
    training = getattr(loaded.config, "training_config", None)
    return int(training.micro_batches) if training is not None else 1


def _number(number: int | Per, loaded: LoadedConfig) -> int:
    return number if isinstance(number, int) else number(loaded.checked)


def _count(micro_batches: int) -> str:
    return "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
