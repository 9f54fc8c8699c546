"""Write a message of text format from its schema: what was set, in the order of the schema, short groups on one line."""

from typing import Any, Literal, get_args, get_origin

from ttlaunch.spec.located.schema import Section

_LONGEST_LINE = 100
_INDENT = "  "
_ALWAYS_OPEN = {"connections"}


def write_textproto(message: Section) -> str:
    """The fields of a message, with an empty line between groups of several lines."""
    text = ""
    for line in _fields(message, ""):
        text += line + "\n"
    return text


def _fields(message: Section, indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in type(message).model_fields.items():
        value = getattr(message, name)
        if name not in message.model_fields_set or value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if values and not isinstance(values[0], Section):
            is_word = _is_word(field.annotation)
            written = [_scalar(item, is_word=is_word) for item in values]
            lines.append(f"{indent}{name}: " + (f"[{', '.join(written)}]" if isinstance(value, list) else written[0]))
            continue
        for item in values:
            lines += _group(name, item, indent)
    return lines


def _group(name: str, message: Section, indent: str) -> list[str]:
    inner = _fields(message, indent + _INDENT)
    line = f"{indent}{name} {{ {' '.join(part.strip() for part in inner)} }}"
    if not indent and len(inner) > 1 and name != "top_level_instance":
        return [f"{name} {{", *inner, "}"]
    if len(line) <= _LONGEST_LINE and name not in _ALWAYS_OPEN:
        return [line]
    return [f"{indent}{name} {{", *inner, f"{indent}}}"]


def _scalar(value: Any, *, is_word: bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str) or is_word:
        return str(value)
    return '"' + "".join(_escaped(character) for character in value) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", errors="replace"))


def _is_word(annotation: Any) -> bool:
    return get_origin(annotation) is Literal or any(_is_word(part) for part in get_args(annotation) if part is not None)
