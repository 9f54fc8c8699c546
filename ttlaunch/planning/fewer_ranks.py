"""Find the largest number of ranks with which a recipe can continue after the cluster has become smaller.

If a key of the configuration decides the size of a layout, a smaller value of the key makes the layout smaller, as with
`--set`. Every rule of the recipe is applied to the result. Any layout can load the checkpoint of any other.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ttlaunch.diagnostics import has_errors
from ttlaunch.planning.given_ranks import World, amounts_of, divided, resized
from ttlaunch.planning.recipe_plan import RecipeChoice, check_recipe
from ttlaunch.planning.roles import RoleLayout
from ttlaunch.spec.recipe.config import LoadedConfig, override_config
from ttlaunch.spec.recipe.declare import Recipe
from ttlaunch.spec.topology.model import Topology
from ttlaunch.spec.topology.without_hosts import leave_out


def largest_world(choice: RecipeChoice, topology: Topology, *, most: int, before: str | None = None) -> World | None:
    """Find the largest world of at most `most` ranks that the recipe allows on a cluster; None if there is none.

    Args:
        choice: The recipe, its configuration without errors.
        topology: The remaining hosts, at least one.
        most: The number of ranks before the cluster became smaller.
        before: The layout before; it is preferred among layouts of equal size.
    """
    slots = len(topology.bindings) if topology.bindings else len(topology.slots)
    worlds = [world for world in _worlds(choice.recipe, choice.loaded, most) if world.ranks <= min(slots, most)]
    # Among equally large worlds, prefer few changed keys, then the layout before, then the recipe's later layouts.
    order = {layout.name: -number for number, layout in enumerate(choice.recipe.layouts)}
    worlds.sort(key=lambda one: (-one.ranks, len(one.overrides), one.layout != before, order[one.layout]))
    return next((world for world in worlds if _is_allowed(world, choice, topology)), None)


def _is_allowed(world: World, choice: RecipeChoice, topology: Topology) -> bool:
    loaded = override_config(choice.recipe, choice.loaded, world.overrides)
    if loaded.config is None:
        return False
    cluster = leave_out(topology, (), max_ranks=world.ranks) if topology.bindings else topology
    layout, found = check_recipe(replace(choice, loaded=loaded), cluster, ranks=world.ranks)
    return isinstance(layout, RoleLayout) and not has_errors(found)


def _worlds(recipe: Recipe, loaded: LoadedConfig, most: int) -> Iterator[World]:
    """Yield every size of every layout, including those that smaller values of its keys give."""
    for layout in recipe.layouts:
        for overrides, config in [((), loaded.checked), *resized(layout, loaded, _smaller_values)]:
            sizes = [None] if layout.any_size is None else range(1, most + 1)
            for size in sizes:
                counts = layout.counts(config, world_size=size)
                if min(counts.values()) >= 1:
                    yield World(sum(counts.values()), overrides, layout.name)


def _smaller_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield smaller numbers; for a list of numbers, yield shorter lists with the same sum, divided as equally as possible."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield from ((str(number), number) for number in range(value - 1, 0, -1))
        return
    amounts = amounts_of(value)
    yield from (divided(amounts, parts) for parts in range(len(amounts) - 1, 0, -1))
