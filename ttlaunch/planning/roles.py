"""Choose the layout of a recipe, and give each rank its role: ranks take roles in layout order."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from ttlaunch.diagnostics import Blame, Diagnostic, Label, listed
from ttlaunch.diagnostics.count import counted
from ttlaunch.planning.given_ranks import worlds_of
from ttlaunch.planning.room import more_ranks_than_slots
from ttlaunch.spec.recipe.config import LoadedConfig
from ttlaunch.spec.recipe.declare import Flow, Layout, Pattern, Per, Recipe
from ttlaunch.spec.topology.model import Rank, Topology


@dataclass(frozen=True)
class RoleLayout:
    """A recipe's layout in a world of a known size.

    Attributes:
        roles: The role of each rank.
        flows: The pairs of roles that communicate.
    """

    layout: Layout
    roles: tuple[str, ...]
    flows: tuple[Flow, ...]

    @property
    def world_size(self) -> int:
        return len(self.roles)


def plan_roles(
    recipe: Recipe, loaded: LoadedConfig, topology: Topology, *, ranks: int | None = None
) -> RoleLayout | Diagnostic:
    """Choose the layout that has the size of the world; if the world size is open, choose the last possible layout.

    Args:
        recipe: The recipe.
        loaded: Its configuration, without errors.
        topology: The cluster; its bindings fix the world size.
        ranks: The value of `--ranks`; None without this option.
    """
    world_size = topology.world_size
    if ranks is not None and world_size is not None and ranks != world_size:
        return _fixed_by_bindings(topology, ranks)
    world_size = ranks if ranks is not None else world_size
    enabled = loaded.checked.multihost_config.enabled
    sizes = {layout: sum(layout.counts(loaded.checked, world_size=world_size).values()) for layout in recipe.layouts}
    if not enabled:
        sizes = {layout: size for layout, size in sizes.items() if size == 1}
    # If two layouts have this size, choose the one that the recipe names first, so that equal inputs give equal plans.
    chosen = _choose(sizes, world_size)
    if chosen is None and ranks is not None and ranks > len(topology.slots):
        return more_ranks_than_slots(topology, ranks)  # with another value of a key the roles may need as many
    if chosen is None:
        return _wrong_size(recipe, loaded, topology, sizes=sizes, world_size=world_size)
    counts = chosen.counts(loaded.checked, world_size=world_size)
    if sum(counts.values()) > len(topology.slots):
        return _too_few_slots(loaded, topology, chosen, counts=counts)
    roles = tuple(role for role, count in counts.items() for _ in range(count))
    return RoleLayout(chosen, roles, recipe.flows_in(list(counts), loaded.checked))


def pairs(flow: Flow, roles: Sequence[str]) -> Iterable[tuple[Rank, Rank]]:
    """Return the pairs of ranks that communicate in a flow."""
    sources = [Rank(rank) for rank, role in enumerate(roles) if role == flow.source]
    targets = [Rank(rank) for rank, role in enumerate(roles) if role == flow.target]
    if flow.pattern is not Pattern.ALL:
        return _pairs_in_grid(sources, flow)
    if flow.source == flow.target:
        return [(a, b) for a in sources for b in targets if a < b]
    return [(a, b) for a in sources for b in targets]


def _pairs_in_grid(ranks: Sequence[Rank], flow: Flow) -> list[tuple[Rank, Rank]]:
    """Return the pairs of ranks in a flow of a grid, whose ranks are arranged row by row."""
    length = flow.row if isinstance(flow.row, int) and flow.row else max(1, len(ranks))
    stride = flow.stride if isinstance(flow.stride, int) and flow.stride else 1
    whole = [ranks[start : start + length] for start in range(0, len(ranks), length)]
    rows = [row[place::stride] for row in whole for place in range(stride)]
    match flow.pattern:
        case Pattern.CHAIN:
            return [pair for row in rows for pair in pairwise(row)]
        case Pattern.ENDS:
            return [(row[0], row[-1]) for row in rows if len(row) > 1]
        case Pattern.ROW:
            return [pair for row in rows for pair in combinations(row, 2)]
        case _:
            return [pair for place in range(length) for pair in combinations(ranks[place::length], 2)]


def _choose(sizes: Mapping[Layout, int], world_size: int | None) -> Layout | None:
    if world_size is None:
        return list(sizes)[-1] if sizes else None
    return next((layout for layout, size in sizes.items() if size == world_size), None)


def _fixed_by_bindings(topology: Topology, ranks: int) -> Diagnostic:
    bound = counted(len(topology.bindings), "rank")
    message = f"`--ranks {ranks}` was given but configuration `{topology.name}` binds {bound}"
    place = Label(topology.bindings[-1].span, _last_of(topology))
    hints = ("leave `--ranks` out, or use `--on local`, which leaves the world size open",)
    return Diagnostic("P004", message, place, hints=hints, blame=Blame.COMMAND_LINE)


def _last_of(topology: Topology) -> str:
    return f"the last of {counted(len(topology.bindings), 'bound rank')}"


def _wrong_size(
    recipe: Recipe, loaded: LoadedConfig, topology: Topology, *, sizes: Mapping[Layout, int], world_size: int | None
) -> Diagnostic:
    config = loaded.checked
    right = sorted({size for layout, size in sizes.items() if layout.any_size is None})
    notes = []
    for layout, size in sizes.items():
        counts = layout.counts(config, world_size=world_size)
        terms = " + ".join(counted(count, role) for role, count in counts.items())
        notes.append(f"layout `{layout.name}`: {terms} = {counted(size, 'rank')}")
    if not config.multihost_config.enabled:
        notes.append("`multihost_config.enabled` is false, so only layouts of one rank count")
    deciding = "multihost_config.num_workers" if config.multihost_config.enabled else "multihost_config.enabled"
    bound = [Label(topology.bindings[-1].span, _last_of(topology))] if topology.bindings else []
    key = loaded.label(deciding, "decides how many ranks the roles need")
    labels = [*bound, *([key] if key else [])]
    return Diagnostic(
        "P003",
        f"the world has {counted(world_size or 0, 'rank')} but the roles need {listed(right, quote='')}",
        labels[0] if labels else None,
        tuple(labels[1:]),
        notes=tuple(notes),
        hints=_resizing_hints(recipe, loaded, topology, right=right, world_size=world_size or 0),
    )


def _resizing_hints(
    recipe: Recipe, loaded: LoadedConfig, topology: Topology, *, right: list[int], world_size: int
) -> tuple[str, ...]:
    """Suggest how to make roles and world agree: another value of the key that sizes a layout, or another world size."""
    hints = []
    config = loaded.checked
    if not config.multihost_config.enabled:
        hints.append("`--set multihost_config.enabled=true` uses several ranks")
    worlds = worlds_of(recipe, loaded, world_size) if world_size <= len(topology.slots) else []
    for world in worlds:
        settings = " ".join(f"--set {shlex.quote(text)}" for text in world.overrides)
        hints.append(f"`{settings}` makes layout `{world.layout}` fit")
    if not topology.bindings and right:
        hints.append(f"`--ranks {right[-1]}` fits without another change")
    return tuple(hints)


def _too_few_slots(
    loaded: LoadedConfig, topology: Topology, layout: Layout, *, counts: Mapping[str, int]
) -> Diagnostic:
    needed, offered = counted(sum(counts.values()), "rank"), counted(len(topology.slots), "slot")
    arithmetic = f"{' + '.join(counted(count, role) for role, count in counts.items())} = {needed}"
    keys = [count.key for count in layout.roles.values() if isinstance(count, Per)]
    key = next((label for name in keys if (label := loaded.label(name, arithmetic))), None)
    offer = f"{offered} on {counted(len(topology.hosts), 'host')}"
    sums = " + ".join(str(host.slots) for host in topology.hosts)
    slots = Label(topology.hosts[-1].slots_span, f"{sums} = {offer}" if len(topology.hosts) > 1 else offer)
    message = f"the roles need {needed} but the hosts offer {offered}"
    if key is None:
        return Diagnostic("P002", message, slots, notes=(arithmetic,))
    return Diagnostic("P002", message, key, (slots,))
