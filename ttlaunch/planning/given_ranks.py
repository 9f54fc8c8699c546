"""Find the keys of a configuration with which a recipe has a given number of ranks, such as three workers for `--ranks 3`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ttlaunch.diagnostics import has_errors
from ttlaunch.spec.recipe.config import LoadedConfig, check_config, override_config
from ttlaunch.spec.recipe.declare import Layout, Per, Recipe
from ttlaunch.spec.recipe.sections import ConfigFile

_WORKERS = "multihost_config.num_workers"
_SET, _RANKS = "--set", "--ranks"


@dataclass(frozen=True)
class World:
    """A number of ranks with which a recipe runs.

    Attributes:
        overrides: The values of `--set` that give this number of ranks.
    """

    ranks: int
    overrides: tuple[str, ...]
    layout: str

    @property
    def keys(self) -> list[str]:
        """Return the keys that are changed."""
        return [text.partition("=")[0] for text in self.overrides]


def set_ranks(recipe: Recipe, loaded: LoadedConfig, ranks: int) -> tuple[LoadedConfig, str]:
    """Change the configuration so that the recipe has this number of ranks, if only one value of one key gives it.

    A key that the user has typed with `--set` stays as it is. A value that a rule forbids is set if no other gives this number:
    then that rule says what is in its way.

    Returns:
        The configuration, and a text that says what was changed; the same configuration and "" if nothing was.
    """
    worlds = [] if loaded.config is None else worlds_of(recipe, loaded, ranks) or _resized_to(recipe, loaded, ranks)
    worlds = [one for one in worlds if _SET not in [loaded.origin(key) for key in one.keys]]
    if len(worlds) != 1 or not worlds[0].overrides:
        return loaded, ""
    overrides = worlds[0].overrides
    sets = " and ".join(f"`{text}`" for text in overrides)
    places = dict.fromkeys(map(loaded.origin, worlds[0].keys))
    text = f"`--ranks {ranks}` sets {sets} in place of the value in {' and '.join(places)}"
    return override_config(recipe, loaded, overrides, option=_RANKS), text.replace("in default", "by default")


def worlds_of(recipe: Recipe, loaded: LoadedConfig, ranks: int) -> list[World]:
    """List the ways in which a recipe can have this number of ranks.

    If layouts have it as they are, these are listed. Otherwise, there is one entry for each layout and each key with another
    value that every rule of the recipe allows.
    """
    config = loaded.checked
    enabled = config.multihost_config.enabled
    layouts = [one for one in recipe.layouts if enabled or sum(one.counts(config).values()) == 1]
    fitting = [one for one in layouts if sum(one.counts(config, world_size=ranks).values()) == ranks]
    if fitting or not enabled:
        return [World(ranks, (), one.name) for one in fitting]
    return [one for one in _resized_to(recipe, loaded, ranks) if _is_allowed(recipe, loaded, world=one)]


def worlds_with(recipe: Recipe, loaded: LoadedConfig, ranks: int) -> list[World]:
    """List all ways in which a recipe can have this number of ranks, as it is and with one key changed, also those that a rule forbids."""
    fitting = [one for one in recipe.layouts if sum(one.counts(loaded.checked, world_size=ranks).values()) == ranks]
    return [*(World(ranks, (), one.name) for one in fitting), *_resized_to(recipe, loaded, ranks)]


def _resized_to(recipe: Recipe, loaded: LoadedConfig, ranks: int) -> list[World]:
    """List the values of one key with which a layout has this number of ranks, whether or not a rule allows them."""
    if not loaded.checked.multihost_config.enabled:
        return []
    return [
        World(ranks, overrides, layout.name)
        for layout in recipe.layouts
        for overrides, other in resized(layout, loaded, lambda now: _values(now, ranks))
        if sum(layout.counts(other).values()) == ranks
    ]


def _is_allowed(recipe: Recipe, loaded: LoadedConfig, *, world: World) -> bool:
    changed = override_config(recipe, loaded, world.overrides)
    layout = next(one for one in recipe.layouts if one.name == world.layout)
    return changed.config is not None and not has_errors(check_config(recipe, changed, layout))


def resized(
    layout: Layout, loaded: LoadedConfig, values: Callable[[Any], Iterable[tuple[str, Any]]]
) -> Iterator[tuple[tuple[str, ...], ConfigFile]]:
    """Yield configurations in which one key that decides the number of ranks has another value, with the values of `--set`.

    Args:
        layout: The layout whose keys are changed.
        loaded: The configuration before the change.
        values: Returns the values to try in place of the present one, each as it is typed and as it is.
    """
    config = loaded.checked
    numbers = [count for count in layout.roles.values() if isinstance(count, Per)]
    keys = dict.fromkeys(key for count in numbers for key in (*count.times, count.key))
    for key in keys:
        for text, value in values(_value(config, key)):
            changed = _with_value(config, key.split("."), value)
            if changed is None:
                break
            overrides = [f"{key}={text}"]
            # If the file gives the number of workers besides the keys that decide it, both must agree.
            if _WORKERS not in keys and loaded.span(_WORKERS) is not None:
                overrides.append(f"{_WORKERS}={max(count(changed) for count in numbers)}")
            yield tuple(overrides), changed


def _values(now: Any, most: int) -> Iterator[tuple[str, Any]]:
    """Yield all numbers up to `most`; for a list of numbers, all lengths up to it."""
    if isinstance(now, int) and not isinstance(now, bool):
        yield from ((str(number), number) for number in range(1, most + 1) if number != now)
    for parts in range(1, most + 1) if (amounts := amounts_of(now)) else ():
        if parts != len(amounts) and parts <= sum(amounts):
            yield divided(amounts, parts)


def amounts_of(value: Any) -> list[int]:
    """Return the numbers of a list, or of the values of a mapping; none for anything else."""
    amounts = list(value.values()) if isinstance(value, dict) else value
    return amounts if isinstance(amounts, list) and all(type(amount) is int for amount in amounts) else []


def divided(amounts: list[int], parts: int) -> tuple[str, list[int]]:
    """Return a list of this length with the same sum, divided as equally as possible, as it is typed and as it is."""
    each, more = divmod(sum(amounts), parts)
    split = [each + (part < more) for part in range(parts)]
    return f"[{', '.join(map(str, split))}]", split


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part, None)
    return config


def _with_value(config: Any, parts: list[str], value: Any) -> Any:
    """Return an unchecked copy with one value changed; None if the name is a derived value instead of a key."""
    name = parts[0]
    if config is None or name not in type(config).model_fields:
        return None
    inner = value if len(parts) == 1 else _with_value(getattr(config, name), parts[1:], value)
    return None if inner is None else config.model_copy(update={name: inner})
