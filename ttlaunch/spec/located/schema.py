"""Check a tree of located values against a pydantic model: return the model, or one diagnostic per mistake.

Pydantic reports a misspelled required key twice, as missing and as extra, and a value that fits no member of a union
once per member; each of these becomes one diagnostic.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from ttlaunch.diagnostics.diagnostic import Diagnostic, KeyMistake, Label, place_of
from ttlaunch.diagnostics.suggest import closest, listed, shown
from ttlaunch.spec.located.codes import FileCodes
from ttlaunch.spec.located.nodes import Key, MapNode, Node, child, key_in, node_at, plain, span_of
from ttlaunch.spec.located.wrong_value import Complaint, describe_wrong_value

_SHAPES = {"list_type", "dict_type", "model_type", "model_attributes_type", "int_type", "string_type", "float_type"}
_UNKNOWN = {"extra_forbidden", "invalid_key"}
_FEW_KEYS = 8


class Section(BaseModel):
    """A part of a file as written: it has no unknown keys, converts no types, and cannot be changed.

    Strict types mean that a list in a file fits `list[...]` and not `tuple[...]`.

    Attributes:
        noun: What messages call the section, such as "a rank binding"; if empty, they use its key.
        marks: Marks that apply to all its keys, such as `Bits` of `spec/recipe/bits.py`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    noun: ClassVar[str] = ""
    marks: ClassVar[tuple[Any, ...]] = ()


ModelT = TypeVar("ModelT", bound=Section)


def check_schema(
    model: type[ModelT], node: Node, *, codes: FileCodes, aliases: Mapping[str, str] | None = None
) -> tuple[ModelT | None, list[Diagnostic]]:
    """Validate the tree.

    Args:
        model: The pydantic model of the file.
        node: The tree of the file.
        codes: The family of codes for its diagnostics.
        aliases: Wrong keys that do not resemble the right one, each with the right one.

    Returns:
        The model, or None; and one diagnostic per mistake, in the order of the file.
    """
    try:
        return model.model_validate(plain(node), strict=True), []
    except ValidationError as error:
        complaints = _one_per_value([_locate(detail, node) for detail in error.errors(include_url=False)])
        check = _Check(model, node, codes, aliases or {}, complaints)
        return None, sorted(check.diagnose(), key=place_of)


def _locate(detail: ErrorDetails, node: Node) -> Complaint:
    """Convert pydantic's location to a path in the file; a step that the file lacks is the name of a member of a union."""
    path: list[Key] = []
    current: Node | None = node
    union_at: tuple[Key, ...] | None = None
    member, at_key = "", False
    for index, step in enumerate(detail["loc"]):
        is_last = index == len(detail["loc"]) - 1
        below = child(current, step)
        if below is not None or (is_last and detail["type"] == "missing"):
            path.append(step)
            current = below
        elif is_last and step == "[key]":
            at_key = True
        elif union_at is None:
            union_at, member = tuple(path), str(step)
    return Complaint(
        detail["type"], tuple(path), detail["msg"], detail.get("ctx", {}), at_key, union_at=union_at, member=member
    )


def _one_per_value(complaints: list[Complaint]) -> list[Complaint]:
    """Keep one complaint about a value of several types: that of the type that was meant, or all of them joined."""
    kept: list[Complaint] = []
    unions: dict[tuple[Key, ...], list[Complaint]] = {}
    for complaint in complaints:
        if complaint.union_at is None:
            kept.append(complaint)
        else:
            unions.setdefault(complaint.union_at, []).append(complaint)
    for path, group in unions.items():
        # A complaint below the value, or about more than its shape, comes from the member that the user meant.
        fitting = [c for c in group if c.path != path or c.at_key or c.kind not in _SHAPES]
        if fitting:
            kept += [c for c in fitting if c.member == fitting[0].member]
        else:
            kept.append(group[0].joined_with(group[1:]))
    return kept


@dataclass(frozen=True)
class _Check:
    """One file, its model, and all of pydantic's complaints about it."""

    model: type[Section]
    node: Node
    codes: FileCodes
    aliases: Mapping[str, str]
    complaints: list[Complaint]

    def diagnose(self) -> Iterator[Diagnostic]:
        for complaint in self.complaints:
            if complaint.kind in _UNKNOWN:
                yield self._unknown_key(complaint.path)
            elif complaint.kind == "missing":
                if not self._is_misspelled(complaint.path):
                    yield self._missing_key(complaint.path)
            else:
                yield describe_wrong_value(complaint, self.node, code=self.codes.wrong_value)

    def _unknown_key(self, path: tuple[Key, ...]) -> Diagnostic:
        key, parent = str(path[-1]), node_at(self.node, path[:-1])
        known, meant = self._unused_keys[path[:-1]], self._meant_keys[path]
        hints = [f"did you mean `{meant}`?"] if meant else []
        if not meant:
            hints += [f"`{shown(key)}` belongs in `{name}`" for name in self._sections_with.get(key, ())][:1]
        known_keys = self._known_keys[path[:-1]]
        keys = known or known_keys
        many = meant is not None and len(keys) > _FEW_KEYS
        expected = f"not among its {len(known_keys)} keys" if many else f"expected {listed(keys)}"
        written = key_in(parent, path[-1]) if isinstance(parent, MapNode) else None
        span = parent.keys[written] if isinstance(parent, MapNode) and written is not None else self.node.span
        message = f"unknown key `{shown(key)}` in {self._noun(path[:-1])}"
        return Diagnostic(
            self.codes.unknown_key, message, Label(span, expected), hints=tuple(hints), key_mistake=KeyMistake.UNKNOWN
        )

    def _missing_key(self, path: tuple[Key, ...]) -> Diagnostic:
        key, message = path[-1], f"`{path[-1]}` is missing in {self._noun(path[:-1])}"
        label = Label(span_of(self.node, path[:-1]), f"has no `{key}`")
        return Diagnostic(self.codes.missing_key, message, label, key_mistake=KeyMistake.MISSING)

    def _noun(self, path: tuple[Key, ...]) -> str:
        key = next((step for step in reversed(path) if isinstance(step, str)), None)
        return _section_at(self.model, path).noun or (f"`{key}`" if key else "this file")

    def _is_misspelled(self, path: tuple[Key, ...]) -> bool:
        """Return whether an unknown key beside it was meant to be this missing one."""
        return path in self._meant_key_paths

    # The properties below are computed once per file, not once per key: a file may have thousands of unknown keys.

    @cached_property
    def _meant_keys(self) -> dict[tuple[Key, ...], str | None]:
        """Return the known key that each unknown one was probably meant to be, by the path of the unknown one."""
        found: dict[tuple[Key, ...], str | None] = {}
        for complaint in self.complaints:
            if complaint.kind in _UNKNOWN:
                section, key = complaint.path[:-1], str(complaint.path[-1])
                found[complaint.path] = (
                    self.aliases.get(key)
                    or closest(key, self._unused_keys[section])
                    or closest(key, self._known_keys[section])
                )
        return found

    @cached_property
    def _meant_key_paths(self) -> set[tuple[Key, ...]]:
        return {(*path[:-1], meant) for path, meant in self._meant_keys.items() if meant is not None}

    @cached_property
    def _known_keys(self) -> dict[tuple[Key, ...], list[str]]:
        """Return the known keys of each section that has an unknown one, by its path."""
        sections = {complaint.path[:-1] for complaint in self.complaints if complaint.kind in _UNKNOWN}
        return {path: list(_fields(_section_at(self.model, path))) for path in sections}

    @cached_property
    def _unused_keys(self) -> dict[tuple[Key, ...], list[str]]:
        """Return the known keys that the file does not have yet, for the same sections as `_known_keys`."""
        found = {}
        for path, known_keys in self._known_keys.items():
            section = node_at(self.node, path)
            present = section.entries if isinstance(section, MapNode) else {}
            found[path] = [key for key in known_keys if key not in present]
        return found

    @cached_property
    def _sections_with(self) -> dict[str, list[str]]:
        """Return for each known key the sections that have it."""
        found: dict[str, list[str]] = {}
        for section_name, section in _sections(self.model):
            for key in _fields(section):
                found.setdefault(key, []).append(section_name)
        return found


def _fields(section: type[Section]) -> dict[str, Any]:
    """Return the keys of a section as a file spells them, with their annotations."""
    return {field.alias or name: field.annotation for name, field in section.model_fields.items()}


def _section_at(model: type[Section], path: tuple[Key, ...]) -> type[Section]:
    """Return the model of the section at `path`, found through the annotations."""
    current = model
    for step in path:
        fields = _fields(current)
        if isinstance(step, str) and step in fields:
            current = section_in(fields[step]) or current
    return current


def key_types(
    model: type[Section], *, prefix: str = "", above: frozenset[type[Section]] = frozenset()
) -> dict[str, Any]:
    """Return the annotation of every dotted key and section of a file, without those of a section inside its own kind."""
    found: dict[str, Any] = {}
    for name, annotation in _fields(model).items():
        section = section_in(annotation)
        found[f"{prefix}{name}"] = annotation
        if section is not None and section not in above:
            found |= key_types(section, prefix=f"{prefix}{name}.", above=above | {model, section})
    return found


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, alone, in a list or as an alternative to null; None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    inner = (section_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((section for section in inner if section), None)


def _sections(
    model: type[Section], *, prefix: str = "", above: frozenset[type[Section]] = frozenset()
) -> Iterator[tuple[str, type[Section]]]:
    """Return the sections inside a model with their dotted names; a section inside one of its own kind is left out."""
    for name, annotation in _fields(model).items():
        section = section_in(annotation)
        if section is not None and section not in above:
            yield prefix + name, section
            yield from _sections(section, prefix=f"{prefix}{name}.", above=above | {model, section})
