"""The forms in which a training can be divided: every recipe and layout that trains the same, with the values of `--set` that give it.

A form has the model, the data, the optimizer and the global batch of the training, and divides their work among ranks in another way. The
form of a recipe is decided by the number of its ranks and by a few keys, such as `zero_config.stage`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from types import MappingProxyType
from typing import Any

import yaml

from ttlaunch.diagnostics import has_errors
from ttlaunch.planning.given_ranks import World, divided, worlds_with
from ttlaunch.spec.located.schema import key_types
from ttlaunch.spec.recipe.config import LoadedConfig, in_yaml, load_config
from ttlaunch.spec.recipe.declare import Layout, Per, Recipe
from ttlaunch.spec.recipe.sections import ConfigFile, TrainingFile

_ENABLED, _WORKERS = "multihost_config.enabled", "multihost_config.num_workers"
_PIPELINE = "multihost_config.pipeline_parallel_config"
_KIND = "compression_config.kind"
_VALUES: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "zero_config.stage": (1, 2, 3),
        "sync_ps_config.num_servers": (1, 2),
        "classic_dp_config.staleness_bound": (0,),
    }
)
"""The values that are tried of keys that decide a form. Stale gradients would be another training, so their bound is 0."""
_SCHEDULES = (("schedule=gpipe",), ("schedule=1f1b",), ("schedule=interleaved", "chunks_per_rank=2"))
_ROUNDING = ("tensor_parallel_config.ranks", f"{_PIPELINE}.ranks_per_stage")
"""Keys above 1 with which partial sums within a matrix product are added by several ranks, and so are rounded."""
_SMALL = 4


@dataclass(frozen=True)
class Form:
    """One way to divide a training.

    Attributes:
        ranks: How many ranks it has.
        values: What decides the form, as `KEY=VALUE`.
    """

    recipe: str
    ranks: int
    values: tuple[str, ...]


def sizes_of(slots: int) -> list[int]:
    """Return the numbers of ranks that are tried with so many slots: all up to 4, then powers of 2, and the number of slots.

    >>> sizes_of(3), sizes_of(12)
    ([1, 2, 3], [1, 2, 4, 8, 12])
    """
    if slots <= _SMALL:
        return list(range(1, slots + 1))
    return [*(2**power for power in range(slots.bit_length()) if 2**power < slots), slots]


def excluded(recipe: Recipe, training: ConfigFile) -> str | None:
    """Return why a recipe cannot train the same in any form, as a clause; None if it may."""
    if recipe.only_weights or not issubclass(recipe.config, TrainingFile):
        return "it trains nothing"
    if recipe.is_asynchronous:
        return "its server updates after each gradient, so it has no steps of the global batch"
    kind = value_at(training, _KIND)
    if kind not in (None, "none") and _KIND not in key_types(recipe.config):
        return f"it cannot compress gradients as `{_KIND}: {kind}` says"
    return None


def forms_of(
    name: str, recipe: Recipe, training: ConfigFile, *, sizes: Sequence[int], slots: int, alone: bool
) -> Iterator[Form]:
    """Yield the forms of a recipe, also those that a rule of it forbids.

    Args:
        name: The recipe's name.
        recipe: The recipe.
        training: The training's own configuration, of any recipe.
        sizes: The numbers of ranks that are wanted.
        slots: How many there can be.
        alone: Whether the form of one rank, which all recipes have in common, is among them.
    """
    seen: set[tuple[int, frozenset[str]]] = set()
    for first in _variations(recipe, training):
        loaded = shared(recipe, training, first)
        if loaded.config is None or has_errors(loaded.diagnostics):
            yield Form(name, min(sizes), first)  # whoever plans it learns why
            continue
        for ranks in sizes:
            worlds = worlds_with(recipe, loaded, ranks) if 1 < ranks <= slots else []
            found = [Form(name, 1, ())] if ranks == 1 and alone else []
            found += [Form(name, ranks, _named(recipe, loaded, first, world=world)) for world in worlds]
            for form in found:
                if (key := (form.ranks, frozenset(form.values))) not in seen:
                    seen.add(key)
                    yield form


def _named(recipe: Recipe, loaded: LoadedConfig, first: Sequence[str], *, world: World) -> tuple[str, ...]:
    """Return what decides a form: values that were chosen, and the numbers of its ranks, also those that are the defaults."""
    layout: Layout = next(one for one in recipe.layouts if one.name == world.layout)
    numbers = [key for count in layout.roles.values() if isinstance(count, Per) for key in count.keys]
    given = {text.partition("=")[0] for text in (*first, *world.overrides)}
    kept = [text for text in first if text.partition("=")[0] not in world.keys]
    defaults = [
        f"{key}={value}"
        for key in dict.fromkeys(numbers)
        if key not in given and key in key_types(recipe.config)
        if isinstance(value := value_at(loaded.config, key), int) and (value > 1 or key == _WORKERS)
    ]
    return (*kept, *defaults, *world.overrides)


def shared(recipe: Recipe, training: ConfigFile, values: Sequence[str] = ()) -> LoadedConfig:
    """Return the configuration of a recipe that trains what another configuration trains, with further values as `KEY=VALUE`.

    It has the values that were given for the other one and that both read, without those that decide the number of ranks.
    """
    given = training.model_dump(mode="json", by_alias=True, exclude_unset=True)
    left_out = {*recipe.unread, _ENABLED, _WORKERS, _PIPELINE}
    known = key_types(recipe.config)
    content = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in left_out}
        if isinstance(keys, dict)
        else keys
        for section, keys in given.items()
        if section in known and section not in left_out
    }
    text = yaml.safe_dump(content, allow_unicode=True).encode()
    return load_config(recipe, None, name="the training", standard_input=text, overrides=values)


def as_options(wanted: ConfigFile, base: ConfigFile, *, unread: Sequence[str]) -> tuple[str, ...]:
    """Return the values of `--set` that turn a configuration of a recipe into another one of it.

    Args:
        wanted: The configuration that is wanted.
        base: The one that the recipe's own file gives.
        unread: Keys that the recipe never reads, and that nobody may set.
    """
    contents = [one.model_dump(mode="json", by_alias=True) for one in (wanted, base)]
    pairs = _pairs(contents[0], contents[1])
    return tuple(f"{key}={in_yaml(value)}" for key, value, before in pairs if value != before and key not in unread)


def same_bits(recipe: Recipe, config: ConfigFile) -> bool:
    """Whether a form has the bits of one process on the whole batch."""
    depends = recipe.is_asynchronous or any(key.startswith("multihost_config") for key in recipe.same_on_resume)
    rounds = any((value_at(config, key) or 1) > 1 for key in _ROUNDING) or config.device_config.enable_tp
    coded = (
        value_at(config, _KIND) not in (None, "none") or value_at(config, "data_parallel_config.reduction") == "fast"
    )
    late = (value_at(config, "classic_dp_config.staleness_bound") or 0) > 0
    drops = value_at(config, "sync_ps_config.straggler") == "drop"
    return not (depends or rounds or coded or late or drops)


def steps_of(config: ConfigFile, *, least: int) -> int:
    """Return how many steps show what a step takes on average: as many as lie between two averages, if not every step has one."""
    every = [value_at(config, f"{section}.every") for section in ("local_sgd_config", "diloco_config")]
    return max(least, *(one for one in every if isinstance(one, int)), 1)


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key; None if a part of it is missing."""
    for part in key.split("."):
        config = getattr(config, part, None)
    return config


def _variations(recipe: Recipe, training: ConfigFile) -> Iterator[tuple[str, ...]]:
    """Yield the combinations of values of the keys that decide a recipe's form, apart from its number of ranks."""
    known = key_types(recipe.config)
    keys = [key for key in _VALUES if key in known]
    tried: list[list[tuple[str, ...]]] = [[(f"{key}={value}",) for value in _VALUES[key]] for key in keys]
    if _has_stages(recipe):
        blocks = value_at(training, "transformer_config.num_blocks") or 1
        halves, _ = divided([blocks], min(2, blocks))
        stages = f"{_PIPELINE}.blocks_per_rank={halves}"
        tried.append([(stages, *(f"{_PIPELINE}.{one}" for one in texts)) for texts in _SCHEDULES])
    yield from (tuple(chain.from_iterable(one)) for one in product(*tried))


def _has_stages(recipe: Recipe) -> bool:
    counts = [count for layout in recipe.layouts for count in layout.roles.values() if isinstance(count, Per)]
    return any(count.key.startswith(_PIPELINE) for count in counts)


def _pairs(wanted: Mapping[str, Any], base: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, value in wanted.items():
        before = base.get(name)
        if isinstance(value, dict) and isinstance(before, dict) and value.keys() == before.keys():
            yield from _pairs(value, before, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, before
