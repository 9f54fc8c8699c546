"""The training configuration: read a file, apply `--set`, check the result against the recipe, and keep each value's origin."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from ttlaunch.diagnostics import Blame, Diagnostic, KeyMistake, Label, Source, Span, has_errors, shown
from ttlaunch.diagnostics.diagnostic import mistake_at
from ttlaunch.spec.located.codes import CONFIGURATION
from ttlaunch.spec.located.schema import Section, check_schema, key_types, section_in
from ttlaunch.spec.located.source import read_source, source_from_bytes
from ttlaunch.spec.located.yaml import ListNode, MapNode, Node, node_at, parse_yaml, span_of
from ttlaunch.spec.recipe.checks import GENERAL, num_workers_counts_the_stages
from ttlaunch.spec.recipe.declare import Check, Layout, NeedsProcesses, Problem, Recipe, unknown_key
from ttlaunch.spec.recipe.sections import SAID_BY, ConfigFile, TrainingFile

_WHAT = "a training file"
_SET = "--set"
_DOTTED = re.compile(r"\w+(\.\w+)+")
_WORKERS = "multihost_config.num_workers"
_NAIVE_ONLY = {
    "multihost_config.enabled": True,
    "training_config.precision": "fp32",
    "training_config.early_stop_patience": None,
    "training_config.log_layer_grad_norms": False,
    "training_config.audit_interval": None,
    "checkpoint_config.initial_weights": None,
}
"""The values that every naive form requires: several ranks, no loss scale, no use of validations, no weights from a file."""


_NAIVE_UNUSED = ("checkpoint_config.interval", "training_config.validation_interval")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration, with the places of its values for later diagnostics.

    Attributes:
        config: The configuration; None if a diagnostic is an error.
        root: The tree of the values that the user gave, in the file or with `--set`.
    """

    config: ConfigFile | None
    root: MapNode
    diagnostics: tuple[Diagnostic, ...]

    @property
    def checked(self) -> ConfigFile:
        """Return the configuration; call only if no diagnostic is an error."""
        assert self.config is not None  # noqa: S101
        return self.config

    @property
    def uses_mpi(self) -> bool:
        """Whether the ranks exchange their messages by MPI, or by what MPI has set up; also true if there are errors."""
        return self.config is None or self.config.multihost_config.socket_type != "grpc"

    def span(self, key: str) -> Span | None:
        """Return where the user wrote this dotted key, or the key that stands for it; None if its value is the default."""
        path = tuple(key.split("."))
        if node_at(self.root, path) is not None:
            return span_of(self.root, path)
        return self.span(SAID_BY[key]) if key in SAID_BY else None

    def label(self, key: str, text: str = "") -> Label | None:
        """Return a label at the place of a dotted key; None if its value is the default."""
        span = self.span(key)
        return Label(span, text) if span else None

    def comment(self, key: str) -> str:
        """Return the user's comment behind the value of this dotted key, on the same line; empty if there is none."""
        span = self.span(key)
        if span is None:
            return ""
        import yaml  # noqa: PLC0415 - only a file that is written anew needs it here

        line = span.source.line(span.line)
        try:
            # A `#` inside a text is part of its token. Tokens without width, such as the end of a block, do not count.
            ends = [one.end_mark.column for one in yaml.scan(line) if one.end_mark.index > one.start_mark.index]
        except yaml.YAMLError:  # the value continues in the next line
            return ""
        behind = line[max(ends) :].strip()
        return behind.removeprefix("#").strip() if behind.startswith("#") else ""

    def strings(self) -> list[tuple[str, str]]:
        """Return every value that is a string, with its dotted key; empty without a valid configuration."""
        content = self.config.model_dump() if self.config is not None else {}
        found: list[tuple[str, str]] = []
        parts: list[tuple[str, Any]] = list(content.items())
        while parts:
            key, value = parts.pop(0)
            if isinstance(value, dict):
                parts += [(f"{key}.{name}", part) for name, part in value.items()]
            elif isinstance(value, str):
                found.append((key, value))
        return found

    def origin(self, key: str) -> str:
        """Return where the value of a dotted key came from: `train.yaml:7`, `--set`, `--ranks` or `default`."""
        span = self.span(key)
        if span is None:
            return "default"
        return span.source.name if span.source.name.startswith("--") else f"{span.source.name}:{span.line}"


def load_config(
    recipe: Recipe,
    path: Path | None,
    *,
    name: str | None = None,
    standard_input: bytes | None = None,
    overrides: Sequence[str] = (),
    blame: Blame = Blame.DESCRIPTION,
) -> LoadedConfig:
    """Read the training file, merge `--set KEY=VALUE` into it, and check it against the recipe's `Config`.

    Args:
        recipe: The recipe that the configuration belongs to.
        path: The training file; None for only defaults and `overrides`.
        name: The name of the file in messages.
        standard_input: The bytes of the file if they are not at `path`.
        overrides: `KEY=VALUE` each, with the value in YAML; later ones take precedence.
        blame: What is at fault if the file cannot be opened.
    """
    root, found = _read_root(path, name=name, standard_input=standard_input, blame=blame)
    is_readable = not has_errors(found)
    root, mistakes = _merge_overrides(recipe, root, overrides)
    found += mistakes
    return _checked(recipe, root, found) if is_readable else LoadedConfig(None, root, tuple(found))


def override_config(
    recipe: Recipe, loaded: LoadedConfig, overrides: Sequence[str], *, option: str = _SET
) -> LoadedConfig:
    """Return the configuration with further `KEY=VALUE`, which follow from an option, checked again."""
    root, found = _merge_overrides(recipe, loaded.root, overrides, option=option)
    return _checked(recipe, root, found)


def _checked(recipe: Recipe, root: MapNode, found: list[Diagnostic]) -> LoadedConfig:
    config, mistakes = check_schema(recipe.config, root, codes=CONFIGURATION)
    found += [*mistakes, *_unread_keys(recipe, root)]
    return LoadedConfig(None if has_errors(found) else config, root, tuple(found))


def _merge_overrides(
    recipe: Recipe, root: MapNode, overrides: Sequence[str], *, option: str = _SET
) -> tuple[MapNode, list[Diagnostic]]:
    found = []
    for text in overrides:
        merged = _merge_override(root, text, option)
        mistakes = [merged] if isinstance(merged, Diagnostic) else _unknown_keys(recipe, text)
        found += mistakes
        if isinstance(merged, MapNode) and not mistakes:
            root = merged
    return root, found


def check_config(recipe: Recipe, loaded: LoadedConfig, layout: Layout) -> list[Diagnostic]:
    """Apply the recipe's own rules for this layout; each diagnostic points at its key."""
    if loaded.config is None:
        return []
    general = GENERAL if isinstance(loaded.config, TrainingFile) else ()
    problems = [(check, problem) for check in (*general, *recipe.checks) for problem in check(loaded.config, layout)]
    wrong = [one for check, problem in problems for one in _unknown_keys_of(problem, check, recipe)]
    return [*(_diagnose(problem, loaded) for _, problem in problems), *wrong]


def _unknown_keys_of(problem: Problem, check: Check, recipe: Recipe) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each key of a problem that the recipe lacks: its report could not point at any place."""
    known = key_types(recipe.config)
    for key in (problem.key, *(key for key, _ in problem.others)):
        if key not in known:
            message = f"a check of the recipe names `{shown(key)}`, {unknown_key(recipe.config, key)}"
            code = getattr(check, "__code__", None)
            place = (f"the check is `{check.__name__}`, {code.co_filename}:{code.co_firstlineno}",) if code else ()
            yield Diagnostic("P006", message, notes=place)


def check_one_process(recipe: Recipe, loaded: LoadedConfig, *, world_size: int) -> list[Diagnostic]:
    """Report values that cannot be simulated because each rank needs its own process; nothing for one rank."""
    if world_size == 1:
        return []
    return [
        _diagnose(_not_in_one_process(need), loaded)
        for need in recipe.needs_processes
        if value_of(loaded, need.key) == need.value
    ]


def naive_config(name: str, recipe: Recipe, loaded: LoadedConfig) -> tuple[LoadedConfig, list[Diagnostic]]:
    """Return the configuration for a recipe's naive form, without checkpoints, and diagnostics for keys it does not support."""
    if not isinstance(loaded.config, TrainingFile) or recipe.naive is None:
        return loaded, []
    only = {**_NAIVE_ONLY, **recipe.naive.only}
    found = [
        _diagnose(_not_naive(name, key, loaded, only=value), loaded)
        for key, value in only.items()
        if value_of(loaded, key) != value
    ]
    unsaved = loaded.config.checkpoint_config.model_copy(update={"interval": None})
    config = loaded.config.model_copy(update={"checkpoint_config": unsaved})
    return replace(loaded, config=None if found else config), found


def unused_by_naive(loaded: LoadedConfig) -> str:
    """Say which keys that the user has set have no effect in a naive form, which saves and validates nothing; or ""."""
    unused = [
        f"`{key}={_as_yaml(value_of(loaded, key), bare=True)}` ({loaded.origin(key)})"
        for key in _NAIVE_UNUSED
        if loaded.span(key) is not None and value_of(loaded, key) is not None
    ]
    return (
        f"`--naive` saves no checkpoints and makes no validations: {' and '.join(unused)} without effect"
        if unused
        else ""
    )


def _not_naive(name: str, key: str, loaded: LoadedConfig, *, only: Any) -> Problem:
    text, given = (_as_yaml(one, bare=True) for one in (only, value_of(loaded, key)))
    message = f"`{key}` is `{given}`; the naive form of `{name}` trains only with `{text}`"
    hints = (f"`--set {key}={text}`, or leave `--naive` out",)
    return Problem("C090", message, key, f"expected `{text}`", hints=hints)


def _not_in_one_process(need: NeedsProcesses) -> Problem:
    value, instead = (str(one).lower() if isinstance(one, bool) else one for one in (need.value, need.instead))
    message = f"`{need.key.rpartition('.')[2]}` is `{value}`, which needs a process for each rank; they share one here"
    hints = (f"`--set {need.key}={instead}` can be simulated", "`ttlaunch run` starts a process for each rank")
    return Problem("C043", message, need.key, need.because, hints=hints)


def render_resolved(recipe: Recipe, loaded: LoadedConfig) -> str:
    """Render everything that the recipe reads as YAML, each value with its origin; the text is a valid training file."""
    if loaded.config is None:
        return ""
    entries = _entries(loaded.config.model_dump(), unread=_unread(recipe, loaded))
    lines = [text if is_head else f"{text}  # {loaded.origin(key)}" for text, key, is_head in entries]
    return "\n".join(lines) + "\n"


def render_commented(recipe: Recipe, loaded: LoadedConfig) -> str:
    """Render everything that the recipe reads as YAML, each key with its meaning; the text is a valid training file.

    The meaning is the comment beside the key in the file that was read, which explains the recipe's own choice; without
    one, it is the description in the key's definition.
    """
    if loaded.config is None:
        return ""
    meanings = _meanings(recipe.config)
    values = loaded.config.model_dump()
    entries = list(_entries(values, unread=_unread(recipe, loaded), bare=True))
    width = max(len(text) for text, _, _ in entries)
    lines: list[str] = []
    for text, key, _ in entries:
        lines += [""] if key in values and lines else []  # an empty line before every section but the first
        meaning = loaded.comment(key) or meanings.get(key, "")
        lines.append(f"{text:<{width}}  # {meaning}" if meaning else text)
    return "\n".join(lines) + "\n"


def _unread(recipe: Recipe, loaded: LoadedConfig) -> list[str]:
    """Return the keys that a file of this recipe must not have, or that would repeat what another key decides."""
    unread = [*recipe.unread]
    if num_workers_counts_the_stages in recipe.checks and loaded.span(_WORKERS) is None:
        unread.append(_WORKERS)  # the stages determine it; a file need not repeat it
    return unread


def keys_of(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[Section] | None]]:
    """Yield every dotted key of a training file with its field, and its section if it is the name of one."""
    for name, field in model.model_fields.items():
        key, section = f"{prefix}{field.alias or name}", section_in(field.annotation)
        yield key, field, section
        if section is not None:
            yield from keys_of(section, f"{key}.")


def _meanings(model: type[Section]) -> dict[str, str]:
    """Return the description of every dotted key, and of a section the first line of its docstring."""
    found = {}
    for key, field, section in keys_of(model):
        choices = [str(one) for one in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
        about = (section.__doc__ or "").partition("\n")[0] if section else field.description or ""
        names_choices = all(re.search(rf"\b{re.escape(choice)}\b", about) for choice in choices)
        found[key] = about if names_choices else f"{', '.join(choices)}: {about}"
    return found


def _entries(
    values: dict[str, Any], *, unread: Sequence[str], bare: bool = False, prefix: str = "", indent: str = ""
) -> Iterator[tuple[str, str, bool]]:
    """Yield each line with its dotted key, and whether it is the head of a section, which has no value."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if dotted in unread:
            continue
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            yield f"{indent}{key}:", dotted, True
            yield from _entries(value, unread=unread, bare=bare, prefix=f"{dotted}.", indent=indent + "  ")
        else:
            yield f"{indent}{key}: {_as_yaml(value, bare=bare)}", dotted, False


def in_yaml(value: Any) -> str:
    """Write a value as `--set KEY=VALUE` takes it, on one line."""
    return _as_yaml(value, bare=True)


def _as_yaml(value: Any, *, bare: bool) -> str:
    """Write a value on one line.

    Texts are quoted, because YAML would read a bare `1e3` or `yes` as another type. With `bare`, plain words that YAML
    reads as texts are not quoted.
    """
    if value is None or isinstance(value, bool | int):  # most values, each of which takes the library 0.05 ms
        return json.dumps(value)
    import yaml  # noqa: PLC0415 - only a run that writes its configuration needs it here

    style = '"' if isinstance(value, str) and not (bare and value.isidentifier()) else None
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def _read_root(
    path: Path | None, *, name: str | None, standard_input: bytes | None, blame: Blame
) -> tuple[MapNode, list[Diagnostic]]:
    empty = _no_keys()
    if path is None and standard_input is None:
        return empty, []
    if standard_input is not None:
        source, found = source_from_bytes(standard_input, codes=CONFIGURATION, what=_WHAT, name=name or "-")
    else:
        source, found = read_source(Path(path or ""), codes=CONFIGURATION, what=_WHAT, name=name, blame=blame)
    if source is None:
        return empty, found
    node, mistakes = parse_yaml(source, codes=CONFIGURATION)
    found += mistakes
    if node is not None and not isinstance(node, MapNode):
        message = f"{source.name} is not a training file; keys and values were expected"
        found.append(Diagnostic(CONFIGURATION.wrong_value, message, Label(node.span)))
    return (node if isinstance(node, MapNode) else empty), found


def _no_keys() -> MapNode:
    return MapNode(Source("defaults", "").span(1, 1), {}, {})


def _merge_override(root: MapNode, text: str, option: str = _SET) -> MapNode | Diagnostic:
    key, equals, value = text.partition("=")
    source = Source(option, text)
    parts = key.strip().split(".")
    if not equals or not all(parts):
        message = f"`--set {shown(text)}` is not KEY=VALUE"
        hints = ("write the key with its section: `--set training_config.batch_size=16`",)
        if _DOTTED.fullmatch(text.strip()):
            hints = (f"`--set {text.strip()}=VALUE`",)
        place = Label(source.span(1, 1, max(1, len(text))))
        return Diagnostic("C017", message, place, hints=hints, blame=Blame.COMMAND_LINE)
    value_source = Source(option, " " * (len(key) + 1) + (value or "~"))
    node, mistakes = parse_yaml(value_source, codes=CONFIGURATION)
    if node is None or has_errors(mistakes):
        message = f"the value of `--set {shown(text)}` is not YAML"
        place = Label(source.span(1, len(key) + 2, max(1, len(value))))
        return Diagnostic("C017", message, place, blame=Blame.COMMAND_LINE)
    starts = accumulate((len(part) + 1 for part in parts), initial=1)
    steps = [(part, Span(source, 1, column, len(part))) for part, column in zip(parts, starts, strict=False)]
    return _with_value(root, steps, _in_source(node, source))


def _unknown_keys(recipe: Recipe, text: str) -> list[Diagnostic]:
    """Report keys of `--set` that no section has. Keys of the file are left out, because the file may have the same unknown key."""
    alone = _merge_override(_no_keys(), text)
    if isinstance(alone, Diagnostic):
        return []
    _, found = check_schema(recipe.config, alone, codes=CONFIGURATION)
    return [diagnostic for diagnostic in found if diagnostic.key_mistake is KeyMistake.UNKNOWN]


def _with_value(root: MapNode, steps: Sequence[tuple[str, Span]], value: Node) -> MapNode:
    """Return a copy of `root` with `value` at the path of `steps`, which are keys with their places; missing keys are added."""
    (key, span), *rest = steps
    inner = root.entries.get(key)
    start = inner if isinstance(inner, MapNode) else MapNode(span, {}, {})
    entry = _with_value(start, rest, value) if rest else value
    keys = root.keys if key in root.keys and rest else {**root.keys, key: span}
    return MapNode(root.span, {**root.entries, key: entry}, keys)


def _in_source(node: Node, source: Source) -> Node:
    """Convert a value's place to a place in the whole text of the command line."""
    span = Span(source, node.span.line, node.span.column, node.span.length)
    if isinstance(node, MapNode):
        entries = {key: _in_source(value, source) for key, value in node.entries.items()}
        keys = {key: Span(source, place.line, place.column, place.length) for key, place in node.keys.items()}
        return MapNode(span, entries, keys)
    if isinstance(node, ListNode):
        return ListNode(span, tuple(_in_source(item, source) for item in node.items))
    return replace(node, span=span)


def _unread_keys(recipe: Recipe, root: MapNode) -> Iterator[Diagnostic]:
    for key in recipe.unread:
        path = tuple(key.split("."))
        parent = node_at(root, path[:-1])
        if isinstance(parent, MapNode) and path[-1] in parent.keys:
            message, hint = f"nothing in this recipe reads `{key}`", f"remove `{path[-1]}`"
            yield mistake_at("C018", message, parent.keys[path[-1]], label="set, but without effect", hint=hint)


def _diagnose(problem: Problem, loaded: LoadedConfig) -> Diagnostic:
    others = [label for key, text in problem.others if (label := loaded.label(key, text))]
    unwritten = [key for key in (problem.key, *(key for key, _ in problem.others)) if loaded.span(key) is None]
    defaults = [(key, value) for key in unwritten if (value := _default(loaded, key)) is not None]
    return Diagnostic(
        problem.code,
        problem.message,
        loaded.label(problem.key, problem.label),
        tuple(others),
        notes=(*problem.notes, *(f"`{key}` is {value} by default" for key, value in defaults)),
        hints=problem.hints,
        severity=problem.severity,
    )


def _default(loaded: LoadedConfig, key: str) -> object:
    value = value_of(loaded, key)
    return value if isinstance(value, str | int | float | bool) else None


def value_of(loaded: LoadedConfig, key: str) -> Any:
    value: Any = loaded.config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value
