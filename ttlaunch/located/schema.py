"""A tree of located values against a pydantic model: the model, or one diagnostic per mistake at its place.

Pydantic reports a misspelled required key twice, as missing and as extra; the two are folded into one "did you mean".
"""

from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from ttlaunch.diagnostics import Diagnostic, Label, closest, listed, shown
from ttlaunch.located.codes import FileCodes
from ttlaunch.located.yaml import MapNode, Node, ScalarNode, node_at, plain, span_of

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "`true` or `false`",
    "bool_parsing": "`true` or `false`",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "none_required": "nothing",
}


class Section(BaseModel):
    """A part of a file as written: no unknown keys, no conversions between types, never changed after reading.

    Attributes:
        noun: What a message calls one of these: "a rank binding".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    noun: ClassVar[str] = "this file"


ModelT = TypeVar("ModelT", bound=Section)


def check_schema(
    model: type[ModelT], node: Node, *, codes: FileCodes, aliases: dict[str, str] | None = None
) -> tuple[ModelT | None, list[Diagnostic]]:
    """Validate the tree.

    Args:
        model: What the file has to look like.
        node: The file.
        codes: Which family of codes its mistakes have.
        aliases: Misspellings too far from the right word for "did you mean", with that word.

    Returns:
        The model, or None; and one diagnostic per mistake, in the order of the file.
    """
    try:
        return model.model_validate(plain(node), strict=True), []
    except ValidationError as error:
        details = error.errors(include_url=False)
        found = [_diagnose(detail, details, model, node, codes, aliases or {}) for detail in _first_of_unions(details)]
        diagnostics = [diagnostic for diagnostic in found if diagnostic is not None]
        return None, sorted(diagnostics, key=_place)


def _place(diagnostic: Diagnostic) -> tuple[int, int]:
    return (diagnostic.primary.span.line, diagnostic.primary.span.column) if diagnostic.primary else (0, 0)


def _first_of_unions(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Of the complaints that the members of a union have about one value, keep the first."""
    kept: dict[tuple[object, ...], ErrorDetails] = {}
    for detail in details:
        kept.setdefault((_in_file(detail["loc"]), detail["type"] in {"missing", "extra_forbidden"}), detail)
    return list(kept.values())


def _in_file(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The part of a pydantic location that names keys and indices; union members and key markers are dropped."""
    return tuple(step for step in loc if isinstance(step, int) or step.isidentifier() or "." in step or "-" in step)


def _diagnose(
    detail: ErrorDetails,
    details: list[ErrorDetails],
    model: type[Section],
    node: Node,
    codes: FileCodes,
    aliases: dict[str, str],
) -> Diagnostic | None:
    path = _in_file(detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(path, details, model, node, codes, aliases)
    if detail["type"] == "missing":
        return _missing_key(path, details, model, node, codes)
    return _wrong_value(detail, path, node, codes)


def _unknown_key(
    path: tuple[str | int, ...],
    details: list[ErrorDetails],
    model: type[Section],
    node: Node,
    codes: FileCodes,
    aliases: dict[str, str],
) -> Diagnostic:
    key, section = str(path[-1]), _section_at(model, path[:-1])
    parent = node_at(node, path[:-1])
    present = set(parent.entries) if isinstance(parent, MapNode) else set()
    known = [name for name in _keys(section) if name not in present]
    span = parent.keys[key] if isinstance(parent, MapNode) and key in parent.keys else node.span
    meant = aliases.get(key) or closest(key, known)
    hints = [f"did you mean `{meant}`?"] if meant else []
    if not meant:
        hints += [f"`{key}` belongs in `{home}`" for home in _homes(model, key)][:1]
    message = f"unknown key `{shown(key)}` in {section.noun}"
    expected = f"expected {listed(known)}" if known else "no further key is possible here"
    return Diagnostic(codes.unknown_key, message, Label(span, expected), hints=tuple(hints))


def _missing_key(
    path: tuple[str | int, ...], details: list[ErrorDetails], model: type[Section], node: Node, codes: FileCodes
) -> Diagnostic | None:
    key, section = str(path[-1]), _section_at(model, path[:-1])
    siblings = [d["loc"] for d in details if d["type"] == "extra_forbidden" and _in_file(d["loc"])[:-1] == path[:-1]]
    known = _keys(section)
    if any(closest(str(loc[-1]), known) == key for loc in siblings):
        return None
    span = span_of(node, path[:-1])
    return Diagnostic(codes.missing_key, f"`{key}` is missing in {section.noun}", Label(span, f"has no `{key}`"))


def _wrong_value(detail: ErrorDetails, path: tuple[str | int, ...], node: Node, codes: FileCodes) -> Diagnostic:
    name = next((str(step) for step in reversed(path) if isinstance(step, str)), "this file")
    found = node_at(node, path)
    value = (
        shown(found.value) if isinstance(found, ScalarNode) else "a list" if isinstance(detail["input"], list) else ""
    )
    expected = _expected(detail)
    if isinstance(found, ScalarNode) and found.value is None:
        message = f"`{name}` has no value"
    elif isinstance(found, ScalarNode):
        quotes = '"' if found.quoted else "`"
        message = f"`{name}` is {quotes}{value}{quotes}; {expected} was expected"
    else:
        kind = "a list" if isinstance(detail["input"], list | tuple) else "a group of keys"
        message = f"`{name}` is {kind}; {expected} was expected"
    hints = ("remove the quotes",) if isinstance(found, ScalarNode) and found.quoted and "number" in expected else ()
    return Diagnostic(codes.wrong_value, message, Label(span_of(node, path), f"expected {expected}"), hints=hints)


def _expected(detail: ErrorDetails) -> str:
    context: dict[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "greater_than":
            return f"a number above {context['gt']:g}"
        case "greater_than_equal":
            return f"a number of at least {context['ge']:g}"
        case "less_than":
            return f"a number below {context['lt']:g}"
        case "less_than_equal":
            return f"a number of at most {context['le']:g}"
        case "literal_error" | "enum":
            return str(context["expected"]).replace("'", "`")
        case "too_short":
            return f"a list of at least {_items(context['min_length'])}"
        case "too_long":
            return f"a list of at most {_items(context['max_length'])}"
        case "string_too_short":
            return "a text that is not empty"
        case "value_error" | "assertion_error":
            return str(context["error"])
        case kind:
            return _EXPECTED.get(kind, detail["msg"].lower())


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


def _section_at(model: type[Section], path: tuple[str | int, ...]) -> type[Section]:
    """The model that describes what stands at `path`, found through the annotations."""
    current = model
    for step in path:
        if isinstance(step, str) and step in current.model_fields:
            current = _section_in(current.model_fields[step].annotation) or current
    return current


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    inner = (_section_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((section for section in inner if section), None)


def _keys(section: type[Section]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _homes(model: type[Section], key: str, prefix: str = "") -> list[str]:
    """The sections of the file in which `key` would be known."""
    homes: list[str] = []
    for name, field in model.model_fields.items():
        section = _section_in(field.annotation)
        if section is not None:
            homes += [prefix + name] if key in section.model_fields else []
            homes += _homes(section, key, f"{prefix}{name}.")
    return homes
