"""The classes and functions with which a recipe declares itself: `Recipe`, `Layout`, `per`, and flows between roles.

RECIPE = Recipe(
    summary="Workers compute gradients, one rank averages and updates.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("two_tier", worker=per("multihost_config.num_workers"), aggregator_optimizer=1),
    ],
    flows=[("worker", "aggregator_optimizer")],
)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import Any, get_args, get_origin

from ttlaunch.diagnostics.diagnostic import Severity
from ttlaunch.diagnostics.suggest import closest, shown
from ttlaunch.spec.located.schema import key_types, section_in
from ttlaunch.spec.recipe.sections import ConfigFile
from ttlaunch.spec.recipe.traffic import Formula

_WEIGHT_OF_AUDITS = 1e-6
"""The weight of the flow of audits, relative to that of gradients: audits move some bytes in some steps, and decide no placement."""


@dataclass(frozen=True)
class Per:
    """A number of ranks that a configuration key decides: its value, or its number of entries.

    Attributes:
        key: The dotted key, such as `multihost_config.num_workers`.
        times: Further keys, whose numbers multiply that of `key`.
        plus: A number, or a key with one, that is added.
    """

    key: str
    times: tuple[str, ...] = ()
    plus: int | str = 0

    def __call__(self, config: ConfigFile) -> int:
        """Read the number; 0 if a key has no value."""
        more = _number(config, self.plus) if isinstance(self.plus, str) else self.plus
        return prod(_number(config, key) for key in (self.key, *self.times)) + more

    def __str__(self) -> str:
        return " × ".join((self.key, *self.times)) + (f" + {self.plus}" if self.plus else "")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that decide the number."""
        return (self.key, *self.times, *((self.plus,) if isinstance(self.plus, str) else ()))


def _number(config: ConfigFile, key: str) -> int:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    if value is None:
        return 0
    return value if isinstance(value, int) else len(value)


def per(key: str, *, times: str | Sequence[str] = (), plus: int | str = 0) -> Per:
    """Return the number of ranks that configuration key `key` gives, multiplied by those of the keys in `times`, and `plus` more.

    Args:
        key: The key.
        times: Further keys, whose numbers multiply that of `key`.
        plus: A number, or a key with one, that is added.
    """
    return Per(key, (times,) if isinstance(times, str) else tuple(times), plus)


class Layout:
    """One way to give roles to ranks; ranks take the roles in the order in which they are named here.

    Attributes:
        name: Its name in the plan and the report.
        roles: The number of ranks of each role, in rank order.
        any_size: The role that takes all remaining ranks, or None. A layout with such a role fits any large enough world.
    """

    def __init__(self, name: str, **roles: int | Per | None) -> None:
        """Name the roles, each with its number of ranks: a fixed number, `per(key)`, or None for all remaining ranks."""
        open_roles = [role for role, count in roles.items() if count is None]
        if not roles or len(open_roles) > 1:
            raise ValueError(f"layout {name!r} needs at least one role and at most one of open size")
        for role, count in roles.items():
            # A flag is a whole number to Python.
            is_number = isinstance(count, int) and not isinstance(count, bool) and count >= 1
            if not is_number and not isinstance(count, Per | None):
                raise ValueError(
                    f"layout {name!r} gives role `{role}` {shown(repr(count))} ranks; a number of at least 1, `per(…)` or None "
                    "was expected"
                )
        self.name = name
        self.roles: dict[str, int | Per | None] = roles
        self.any_size = open_roles[0] if open_roles else None

    def __repr__(self) -> str:
        return f"Layout({self.name!r}, {', '.join(self.roles)})"

    def counts(self, config: ConfigFile, *, world_size: int | None = None) -> dict[str, int]:
        """Count the ranks of each role; a role of open size gets the rest of `world_size`, or without one `num_workers`."""
        fixed = {role: n(config) if isinstance(n, Per) else n for role, n in self.roles.items() if n is not None}
        rest = config.multihost_config.num_workers if world_size is None else max(0, world_size - sum(fixed.values()))
        return {role: rest if count is None else fixed[role] for role, count in self.roles.items()}


class Pattern(StrEnum):
    """Which ranks of the two roles of a flow communicate."""

    ALL = "all"  # every rank of one with every rank of the other
    CHAIN = "chain"  # each rank of the role with the next of its row
    ENDS = "ends"  # the first rank of a row with the last
    ROW = "row"  # every rank of the role with every other of its row
    COLUMN = "column"  # every rank of the role with those at its place in other rows


@dataclass(frozen=True)
class Flow:
    """Two roles that exchange data; only flows count for the placement and the checks of fabric sockets.

    Attributes:
        weight: Bytes that each of its pairs of ranks exchanges in a step, both ways together, relative to the recipe's
            other flows; only ratios count. Equal weights suit a recipe whose flows all carry the same vector.
        row: The number of ranks in a row, for a role whose ranks form a grid, row by row: a number, or a `per` of the
            configuration. None if all ranks form one row.
        stride: The number of interleaved rows in a row: a rank communicates only with the ranks of its row whose distance
            is a multiple of this number. A number or a `per`, as for `row`; None for 1.
        when: Whether a configuration has this flow; None if all have it.
    """

    source: str
    target: str
    pattern: Pattern = Pattern.ALL
    weight: float = 1.0
    row: Per | int | None = None
    when: Callable[[Any], bool] | None = None
    stride: Per | int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"the weight of a flow is a positive number, not {self.weight!r}")

    def under(self, config: ConfigFile) -> "Flow":
        """Return the flow with the numbers of ranks that a configuration gives."""
        row, stride = (one(config) if isinstance(one, Per) else one for one in (self.row, self.stride))
        return replace(self, row=row, stride=stride)


def chain(role: str, *, row: Per | None = None, stride: Per | None = None) -> Flow:
    """Declare that each rank of `role` sends to the next one of its row, as pipeline stages do; see `Flow` for `stride`."""
    return Flow(role, role, Pattern.CHAIN, row=row, stride=stride)


def ends(
    role: str, *, row: Per | None = None, stride: Per | None = None, when: Callable[[Any], bool] | None = None
) -> Flow:
    """Declare that the first rank of each row communicates with the last one."""
    return Flow(role, role, Pattern.ENDS, row=row, when=when, stride=stride)


def in_rows(
    role: str, *, row: Per | None = None, stride: Per | None = None, when: Callable[[Any], bool] | None = None
) -> Flow:
    """Declare that every rank communicates with every other of its row."""
    return Flow(role, role, Pattern.ROW, row=row, when=when, stride=stride)


def in_columns(role: str, *, row: Per, when: Callable[[Any], bool] | None = None) -> Flow:
    """Declare that every rank communicates with those at the same place of other rows, as replicas of a stage do."""
    return Flow(role, role, Pattern.COLUMN, row=row, when=when)


def all_pairs(role: str) -> Flow:
    """Declare that every rank of `role` communicates with every other, as in an all-reduce."""
    return Flow(role, role)


@dataclass(frozen=True)
class Problem:
    """A mistake that a recipe's own check found in a configuration.

    Attributes:
        code: A `C` code.
        message: The first line of the diagnostic.
        key: The dotted key at fault, which the diagnostic marks.
        label: The text below the mark.
        others: Further keys that are involved, each with its label.
    """

    code: str
    message: str
    key: str
    label: str = ""
    others: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    severity: Severity = Severity.ERROR


Check = Callable[[Any, Layout], Iterator[Problem]]


@dataclass(frozen=True)
class NeedsProcesses:
    """A value of a key with which ranks cannot share one process, so that `ttlaunch simulate` refuses it.

    Attributes:
        key: The dotted key, such as `data_parallel_config.reduction`.
        value: The value of the key in the configuration.
        instead: A value of the same key with which ranks can share a process.
        because: What needs several processes; the text below the mark.
    """

    key: str
    value: Any
    instead: Any
    because: str


@dataclass(frozen=True)
class Naive:
    """The naive form of a recipe, in its `naive.py`: the same technique without buckets, overlap, validations or checkpoints.

    Attributes:
        layouts: The layouts of the naive form; each role is a function of `naive.py`.
        flows: The pairs of roles that communicate; None for the flows of the recipe between these roles.
        only: Dotted keys, each with the only value for which the naive form trains like the recipe.
    """

    layouts: Sequence[Layout]
    flows: Sequence[Flow | tuple[str, str]] | None = None
    only: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Elastic:
    """How a recipe trains while its workers come and go, with the bits of a run that nobody disturbs.

    Attributes:
        layout: The layout that allows it, whose ranks all have one role: the name of one of the recipe's, or one that only elastic
            runs have.
        only: Dotted keys, each with the only value that allows it, or a tuple of such values.
        slots: Into how many slots the state is cut that not every worker keeps: a number, or the key that gives it; 0 for as many as
            there are workers; None: every worker has all of it.
        servers: How many workers keep slots and differentiate no micro-batches: a number, or the key that gives it.
        as_roles: Where ranks stay, the roles of those that do what members at the first places do, in the order of these places; further
            members are then workers. A simulation takes the time of a step from such ranks.
        tasks_in_hand: Where a server hands out the data of steps, how many tasks each worker has at a time, or a function that
            returns it; 0: no server does. A simulation of such a recipe needs it.
        clock_gap: By how many steps the fastest member may lead the slowest, or a function that returns it; 0: all members make each step
            together. A simulation needs it. Not together with servers or with `kept_bytes`.
        has_local_steps: Whether workers take steps of their own between averages. The bits are then those of any run whose
            members have changed after the same steps.
        agreed_bytes: How many bytes of each parameter such workers have equal after an average; one that comes gets them.
        shadow_bytes: Returns how many bytes of each parameter all shadows together keep; None if there are no shadows.
        kept_bytes: How many bytes of each parameter each worker keeps of the last step, for one that lacks it: 4 for a mean gradient;
            or a function that returns it.
        traffic: The formula of the bytes that as many ranks, the members of an epoch, move in each step but the first one after a change;
            the report then compares each epoch. None: it compares none.
    """

    layout: str | Layout
    only: Mapping[str, Any] = field(default_factory=dict)
    slots: int | Per | None = None
    servers: int | Per = 0
    as_roles: Sequence[str] = ()
    tasks_in_hand: int | Callable[[Any], int] = 0
    clock_gap: int | Callable[[Any], int] = 0
    has_local_steps: bool = False
    agreed_bytes: int = 0
    shadow_bytes: Callable[[Any], int] | None = None
    kept_bytes: int | Callable[[Any], int] = 0
    traffic: Formula | None = None


@dataclass(frozen=True)
class Audited:
    """How ranks of a recipe check each other's gradients, with `training_config.audit_interval`.

    Attributes:
        role: The role whose ranks differentiate, each with the whole model.
        only: Dotted keys, each with the only value that allows it, or a tuple of such values.
    """

    role: str
    only: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A recipe's declaration.

    Attributes:
        summary: One sentence.
        config: The pydantic model of its training file.
        layouts: Ways to give roles to ranks. The first layout of one rank is the reference that the others must equal. If
            nothing else sets the number of ranks, ttlaunch chooses the last layout that the configuration allows.
        flows: The pairs of roles that communicate; a pair of role names means every rank with every rank.
        checks: Rules beyond the types, functions of the configuration and the chosen layout.
        unread: Dotted keys of the shared sections that this recipe never reads; setting one is an error.
        uses_data: Whether ranks read the training text, so that it is checked before anything starts.
        traffic: The formula of the bytes between each pair of ranks; without one, the report compares no bytes.
        needs_processes: Values of its own keys with which ranks cannot share a process.
        same_on_resume: Dotted keys that must not change when a run resumes from a checkpoint: keys of `multihost_config` on
            which the bits depend (none for recipes with the same bits on any number of ranks), and keys of the recipe for
            which its checkpoints contain state that those of other recipes lack.
        is_asynchronous: Whether each rank has its own steps, whose number is only known at the end. The formula `traffic` is
            then one of the whole run, from counts that ranks record, and `ttlaunch repro` repeats the order of arrivals.
        naive: The naive form, which `--naive` runs; None if the recipe has none.
        elastic: How it trains with `--elastic`, or a clause that says why its ranks have to stay the same; None: they have to.
        only_weights: Whether its ranks train nothing and use the weights of the checkpoint that `--resume` names, of any recipe;
            without one it cannot run. Text and position of that training do not matter then, only the model.
        audited: How its ranks check each other's gradients; None: they cannot.
    """

    summary: str
    config: type[ConfigFile]
    layouts: Sequence[Layout]
    flows: Sequence[Flow | tuple[str, str]] = ()
    checks: Sequence[Check] = ()
    unread: Sequence[str] = ()
    uses_data: bool = True
    traffic: Formula | None = None
    needs_processes: Sequence[NeedsProcesses] = ()
    same_on_resume: Sequence[str] = ()
    is_asynchronous: bool = False
    naive: Naive | None = None
    elastic: Elastic | str | None = None
    only_weights: bool = False
    audited: Audited | None = None
    _flows: tuple[Flow, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_types()
        flows = tuple(flow if isinstance(flow, Flow) else Flow(*flow) for flow in self.flows)
        roles = {role for layout in self.layouts for role in layout.roles}
        unknown = {role for flow in flows for role in (flow.source, flow.target)} - roles
        if not self.layouts:
            raise ValueError("a recipe needs at least one layout")
        if unknown:
            raise ValueError(f"flows name roles that no layout has: {', '.join(sorted(unknown))}")
        object.__setattr__(self, "_flows", flows)
        _check_keys(self, flows)

    def _check_types(self) -> None:
        """Check what would otherwise fail in the middle of a plan; `recipe.py` is plain Python that no type checker has read.

        Raises:
            TypeError, ValueError: A value is of another kind than the field.
        """
        if not (isinstance(self.config, type) and issubclass(self.config, ConfigFile)):
            raise TypeError(
                f"`config` is {shown(repr(self.config))}; a class that is derived from `ConfigFile` was expected"
            )
        if self.uses_data and "data_config" not in key_types(self.config):
            raise ValueError(
                f"`uses_data` is {self.uses_data!r}, but `{self.config.__name__}` has no `data_config`: derive it from "
                "`TrainingFile`, or write `uses_data=False`"
            )
        if self.traffic is not None and not callable(self.traffic):
            raise ValueError(f"`traffic` is {shown(repr(self.traffic))}; a function was expected")

    def flows_in(self, roles: Sequence[str], config: ConfigFile | None = None) -> tuple[Flow, ...]:
        """Return the flows between these roles; with a configuration, only those that it has, with its numbers of ranks."""
        flows = tuple(flow for flow in self._flows if flow.source in roles and flow.target in roles)
        if config is None:
            return flows
        found = tuple(flow.under(config) for flow in flows if flow.when is None or flow.when(config))
        audited = self.audited.role if self.audited is not None and audit_interval(config) else None
        if audited is None or audited not in roles or all_pairs(audited) in found:
            return found
        return (*found, Flow(audited, audited, weight=_WEIGHT_OF_AUDITS))

    def in_elastic_form(self) -> "Recipe":
        """Return the declaration with nothing but the layout in which workers come and go; as it is if there is none."""
        form = self.elastic
        if not isinstance(form, Elastic):
            return self
        if isinstance(form.layout, Layout):
            [role] = form.layout.roles
            return replace(self, layouts=[form.layout], flows=[all_pairs(role)], traffic=None)
        return replace(self, layouts=[layout for layout in self.layouts if layout.name == form.layout])

    def in_naive_form(self, naive: Naive) -> "Recipe":
        """Return the declaration of the naive form: its own layouts and flows, and no formula of its traffic."""
        roles = {role for layout in naive.layouts for role in layout.roles}
        flows = naive.flows
        if flows is None:
            flows = [flow for flow in self._flows if {flow.source, flow.target} <= roles]
        return replace(
            self, layouts=naive.layouts, flows=flows, traffic=None, needs_processes=(), elastic=None, audited=None
        )


_FORMS = (Naive, Elastic, Audited)


def audit_interval(config: Any) -> int | None:
    """Return the steps between audits; None if there are none, or if the configuration trains nothing."""
    interval: int | None = getattr(getattr(config, "training_config", None), "audit_interval", None)
    return interval


def _check_keys(recipe: Recipe, flows: Sequence[Flow]) -> None:
    """Check that every key that a declaration names is one of its configuration, and that a `per` reads a number of ranks.

    Raises:
        ValueError: A key is unknown, or the value of one cannot be a number of ranks.
    """
    types = key_types(recipe.config)
    layouts = [*recipe.layouts, *(recipe.naive.layouts if recipe.naive else ()), *_only_elastic(recipe)]
    counts = [count for layout in layouts for count in layout.roles.values()]
    counts += [count for flow in flows for count in (flow.row, flow.stride)]
    counts += [recipe.elastic.slots, recipe.elastic.servers] if isinstance(recipe.elastic, Elastic) else []
    pers = [key for count in counts if isinstance(count, Per) for key in count.keys]
    named = [("unread", key) for key in recipe.unread] + [("same_on_resume", key) for key in recipe.same_on_resume]
    named += [("needs_processes", need.key) for need in recipe.needs_processes]
    forms = [form for form in (recipe.naive, recipe.elastic, recipe.audited) if isinstance(form, _FORMS)]
    named += [("only", key) for form in forms for key in form.only]
    named += [("per", key) for key in pers if not _is_property(recipe.config, key)]
    for place, key in named:
        if key not in types:
            raise ValueError(f"`{place}` names `{key}`, {unknown_key(recipe.config, key)}")
    for key in pers:
        if key in types and not _can_count(types[key]):
            raise ValueError(
                f"`per` cannot read a number of ranks from `{key}`, which is no whole number, list or mapping"
            )


def _only_elastic(recipe: Recipe) -> list[Layout]:
    """Return the layout that only elastic runs of a recipe have, if there is one."""
    return [one.layout] if isinstance(one := recipe.elastic, Elastic) and isinstance(one.layout, Layout) else []


def _is_property(config: type[ConfigFile], key: str) -> bool:
    """Return whether a dotted name is a property of a section, such as `device_config.local_ranks`."""
    section, _, name = key.rpartition(".")
    model = section_in(key_types(config).get(section)) if section else config
    return isinstance(getattr(model, name, None), property)


def unknown_key(config: type[ConfigFile], key: str) -> str:
    """Return a clause about a dotted key that a configuration does not have, with the one that was probably meant."""
    near = closest(key, key_types(config))
    return "which is no key of the configuration" + (f"; did you mean `{near}`?" if near else "")


def _can_count(annotation: Any) -> bool:
    """Return whether values of this type can be a number of ranks: whole numbers, and collections by their length."""
    parts = get_args(annotation)
    return annotation is int or get_origin(annotation) in {list, dict} or any(_can_count(part) for part in parts)
