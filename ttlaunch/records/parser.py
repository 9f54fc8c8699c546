"""Parse what ranks, shims and agents write and the launcher reads: each record becomes a typed value.

A rank is a user's program and a host is another machine, so everything that they write is checked here before it is used.
A record's class names its fields, and each field's annotation names one of the kinds below, which have a type, a range and a
length. The parser never raises: it returns the typed value, or a `BadRecord` with the reason.

Python 3.9 and the standard library only: every shim imports this file, so it needs neither `dataclasses` nor `typing`,
which cost several milliseconds.
"""

from __future__ import annotations

import json
import math
import re

from ttlaunch.contract import MOST_VALUES, most_values

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_: object) -> object:
        """Do nothing at run time; for type checkers, `record` makes a constructor from the annotations."""
        return lambda decorator: decorator


LONGEST_RECORD = 16 * 1024 * 1024
"""The most bytes of a line or of a file with one record; the digests of a model with many parameters are the longest."""
DEEPEST = 32
"""The deepest nesting of lists and objects; ttlaunch needs five, and a recipe's state in a checkpoint a few more."""
MOST_ITEMS = 4_000_000
"""The most items of a list, and the most steps that the rows of one line of a traffic file may name together."""

_LONGEST_TEXT = 4 * 1024 * 1024
_LONGEST_WORD = 4096
_SHOWN = 40
LARGEST_COUNT = 2**53  # a float can express every whole number up to this one
_LARGEST_SIZE = 2**64  # some file systems report this size
LATEST = 1e11
"""The latest time of a record, in seconds since the epoch: about 3,000 years."""

# Kinds of fields. To a type checker they are plain types; `_KINDS` has what each of them checks.
Count = int
Size = int
Step = int
Rank = int
Pid = int
Port = int
Status = int
Signal = int
Nanoseconds = int
Tag = int
Flag = bool
Time = float
Seconds = float
Number = float  # may be an integer, NaN or infinite
Amount = float  # may be an integer, but must be finite
Text = str
Word = str
Value = object  # a number, a text, a truth value or None
Json = object  # any value of JSON
FilePath = str  # a path as `os.fsdecode` returns it, which may contain bytes that are not UTF-8


class BadRecord:
    """Returned in place of a record that cannot be used; the reason is one clause."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"BadRecord({self.reason!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BadRecord) and self.reason == other.reason

    __hash__ = None  # type: ignore[assignment]  # compared in tests, never a key


class _WrongError(ValueError):
    """A wrong value inside a record; each level that the exception passes adds its name to `path`."""

    def __init__(self, value: object, expected: str) -> None:
        super().__init__(expected)
        self.said = f"{shown(value)}, expected {expected}"
        self.path: list[str] = []

    def within(self, name: object) -> _WrongError:
        self.path.insert(0, str(name)[:_SHOWN])
        return self

    @property
    def reason(self) -> str:
        return f"`{'.'.join(self.path)}` is {self.said}" if self.path else f"it is {self.said}"


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a class a record: it gets a keyword-only constructor, equality by value, and the data for the parser.

    The annotations are the fields; a field with a default in the class may be missing. `vars` of an instance has only the
    values that the constructor received, in their order, so that a record can be written exactly as it was read.
    """
    fields = tuple(cls.__annotations__)
    cls._fields = frozenset(fields)  # type: ignore[attr-defined]
    cls._required = frozenset(name for name in fields if not hasattr(cls, name))  # type: ignore[attr-defined]
    cls.__init__ = _init  # type: ignore[method-assign]
    cls.__eq__ = _equal  # type: ignore[method-assign]
    cls.__repr__ = _repr  # type: ignore[method-assign]
    _CLASSES[cls.__name__] = cls
    return cls


_CLASSES: dict[str, type] = {}


def _init(self: Any, **values: object) -> None:
    if not self._required <= values.keys() <= self._fields:
        wrong = sorted(self._required - values.keys() | values.keys() - self._fields)
        raise TypeError(f"{type(self).__name__} lacks or does not know {', '.join(wrong)}")
    self.__dict__.update(values)


def _equal(self: Any, other: Any) -> bool:
    return type(self) is type(other) and all(getattr(self, name) == getattr(other, name) for name in self._fields)


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def read(cls: type[T], data: bytes) -> T | BadRecord:
    """Parse a line, or a whole file, into a record."""
    content = load(data)
    return content if isinstance(content, BadRecord) else parse(cls, content)


def parse(cls: type[T], content: object) -> T | BadRecord:
    """Parse a value of JSON, such as the header of a frame, into a record."""
    try:
        return _build(cls, content)
    except _WrongError as wrong:
        return BadRecord(wrong.reason)


def _build(cls: type[T], content: object) -> T:
    """Build a record of a class; raise `_WrongError` at the first wrong field."""
    if type(content) is not dict:
        raise _WrongError(content, "an object")
    checks = _CHECKS.get(cls) or _prepare(cls)
    values = {}
    for name, value in content.items():
        check = checks.get(name)
        if check is not None:  # ignore fields that a later version may have added
            try:
                values[name] = check(value)
            except _WrongError as wrong:
                raise wrong.within(name) from None
    for name in cls._required:  # type: ignore[attr-defined]
        if name not in values:
            raise _WrongError(_MISSING, "a value").within(name)
    return cls(**values)


_CHECKS: dict[type, dict[str, Callable[[Any], Any]]] = {}


def _prepare(cls: type) -> dict[str, Callable[[Any], Any]]:
    """Make and keep the checks of a class's fields from its annotations; called when its first record is read."""
    _CHECKS[cls] = {name: check_of(str(kind)) for name, kind in cls.__annotations__.items()}
    return _CHECKS[cls]


def let_parse(cls: type, **kinds: Callable[[Any], Any]) -> None:
    """Let the parser build instances of a dataclass, for values that need methods of their own.

    Args:
        cls: The dataclass. Its annotations name kinds as those of a record do, and must be texts (`from __future__ import
            annotations`).
        kinds: Further kinds in the annotations, each with its check, which raises `ValueError`.
    """
    for name, check in kinds.items():
        _KINDS[name] = _own_check(name, check)
    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
    # A field without either kind of default has the same sentinel for both.
    cls._required = frozenset(name for name, field in fields.items() if field.default is field.default_factory)  # type: ignore[attr-defined]
    _CLASSES[cls.__name__] = cls


def _own_check(name: str, check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked_own(value: Any) -> Any:
        try:
            return check(_word(value))
        except _WrongError:
            raise
        except ValueError:
            raise _WrongError(value, f"an {name}") from None

    return checked_own


def check_of(kind: str) -> Callable[[Any], Any]:
    """Make the check for the kind in an annotation, such as `Count`, `Word | None` or `dict[str, Rank]`."""
    if kind.endswith(" | None"):
        known = check_of(kind[: -len(" | None")])
        return lambda value: None if value is None else known(value)
    if kind.startswith("tuple[") and kind.endswith(", ...]"):
        return _list_of(check_of(kind[len("tuple[") : -len(", ...]")]))
    if kind.startswith("tuple["):
        return _row_of([check_of(part) for part in _parts(kind[len("tuple[") : -1])])
    if kind.startswith("dict[str, "):
        return _mapping_of(check_of(kind[len("dict[str, ") : -1]))
    if kind in _KINDS:
        return _KINDS[kind]
    cls = _CLASSES[kind]
    return lambda value: _build(cls, value)


def checked(kind: str, value: object) -> Any:
    """Check a single value of a kind.

    Raises:
        ValueError: The value is not of this kind.
    """
    return check_of(kind)(value)


def _parts(kinds: str) -> list[str]:
    """Split the kinds of a row at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in kinds:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _list_of(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked_list(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > MOST_ITEMS:
            raise _WrongError(value, "a list")
        found = []
        for number, one in enumerate(value):
            try:
                found.append(check(one))
            except _WrongError as wrong:
                raise wrong.within(number) from None
        return tuple(found)

    return checked_list


def _row_of(checks: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def checked_row(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != len(checks):
            raise _WrongError(value, f"a list of {len(checks)}")
        try:
            return tuple([check(one) for check, one in zip(checks, value)])  # noqa: B905 - Python 3.9; the lengths agree
        except _WrongError as wrong:
            raise wrong.within("…") from None

    return checked_row


def _mapping_of(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    bounds = getattr(check, "bounds", None)

    def checked_mapping(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _WrongError(value, "an object")
        # Telemetry is made of large mappings of whole numbers. Those without a mistake, which are almost all, are checked as a whole, in a
        # tenth of the time; of any other one, the loop below names the mistake.
        if bounds and value and _are_plain(value) and set(map(type, value.values())) == {int}:
            least, most = bounds
            if least <= min(value.values()) and max(value.values()) <= most:
                return dict(value)
        found = {}
        for name, one in value.items():
            try:
                # Almost every name is short and ASCII; to ask that here saves a third of the time of a large mapping.
                is_plain = type(name) is str and len(name) <= _LONGEST_WORD and name.isascii()
                found[name if is_plain else _word(name)] = check(one)
            except _WrongError as wrong:
                raise wrong.within(name) from None
        return found

    return checked_mapping


def _are_plain(names: dict[str, Any]) -> bool:
    """Whether all names are short and ASCII."""
    return set(map(type, names)) == {str} and max(map(len, names)) <= _LONGEST_WORD and "".join(names).isascii()


def _whole(least: int, most: int, expected: str) -> Callable[[Any], Any]:
    def checked_whole(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _WrongError(value, expected)
        return value

    checked_whole.bounds = (least, most)  # type: ignore[attr-defined]
    return checked_whole


def _real(least: float, most: float, expected: str) -> Callable[[Any], Any]:
    def checked_real(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:  # nan is neither
            raise _WrongError(value, expected)
        return float(value)

    return checked_real


def _text_up_to(longest: int) -> Callable[[Any], Any]:
    def checked_text(value: Any) -> str:
        if type(value) is not str or len(value) > longest:
            raise _WrongError(value, "a text" if type(value) is not str else f"at most {longest} characters")
        # Half of a surrogate pair cannot be printed; a path with bytes that are no text has such halves.
        if not value.isascii():
            return value.encode("utf-8", "replace").decode()
        return str(value)

    return checked_text


_word = _text_up_to(_LONGEST_WORD)
_text = _text_up_to(_LONGEST_TEXT)


def _path(value: Any) -> str:
    if type(value) is not str or len(value) > _LONGEST_WORD or "\0" in value:
        raise _WrongError(value, "a path")
    return str(value)


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _number(value: Any) -> float:
    """Check a number as `contract.record_line` writes it: NaN and infinities are texts; integers stay integers."""
    if type(value) is str and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if type(value) is float or (type(value) is int and -_LARGEST_SIZE <= value <= _LARGEST_SIZE):
        return value
    raise _WrongError(value, "a number")


def _value(value: Any) -> object:
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return _NOT_FINITE[value] if value in _NOT_FINITE else _text(value)
    return _number(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _WrongError(value, "true or false")
    return value


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not -_LARGEST_SIZE <= value <= _LARGEST_SIZE:  # nan is neither
        raise _WrongError(value, "a finite number")
    return value  # type: ignore[no-any-return]  # an integer stays one


_COUNT = _whole(0, LARGEST_COUNT, "a whole number from 0 to 2**53")
_KINDS: dict[str, Callable[[Any], Any]] = {
    "Count": _COUNT,
    "Step": _COUNT,
    "Size": _whole(0, _LARGEST_SIZE, "a number of bytes"),
    "Rank": _whole(0, 2**31 - 1, "a rank"),
    "Pid": _whole(1, 2**31 - 1, "the number of a process"),
    "Port": _whole(1, 65535, "the number of a port"),
    "Status": _whole(0, 255, "an exit status"),
    "Signal": _whole(1, 128, "the number of a signal"),
    "Nanoseconds": _whole(-_LARGEST_SIZE, _LARGEST_SIZE, "a time in nanoseconds"),
    "Tag": _whole(-(2**63), 2**63, "a whole number"),
    "Flag": _flag,
    "Time": _real(0.0, LATEST, "seconds since 1970"),
    "Seconds": _real(0.0, LATEST, "a number of seconds"),
    "Number": _number,
    "Amount": _amount,
    "Text": _text,
    "FilePath": _path,
    "Word": _word,
    "Value": _value,
    "Json": lambda value: value,
}


def shown(value: object) -> str:
    """Show a wrong value in a message, shortened; lists and objects are only named."""
    if value is _MISSING:
        return "missing"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if type(value) is int and abs(value) > _LARGEST_SIZE:
        return "a number too large"
    return repr(value[:_SHOWN] if isinstance(value, (str, bytes)) else value)


_MISSING = object()


_STRINGS = rb'(?s)"(?:[^"\\]|\\.)*"?'  # compiled only when it is needed, because shims never need it
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_FIRST = frozenset(b' \t\r\n\0{["-0123456789tfnNI\xef\xfe\xff')  # of JSON in any encoding


def load(data: bytes) -> Any:
    """Parse JSON, after a check that it is neither too long nor nested too deep, and that its values fit into memory."""
    if len(data) > LONGEST_RECORD:
        return BadRecord(f"it is longer than {LONGEST_RECORD // 2**20} MiB")
    if not data or data[0] not in _FIRST:  # what the parser says, for a tenth of its time
        return BadRecord("it is no JSON: Expecting value: line 1 column 1 (char 0)")
    if most_values(data) > MOST_VALUES and most_values(re.sub(_STRINGS, b"", data)) > MOST_VALUES:
        return BadRecord(f"it has more than {MOST_VALUES:,} values")
    if not is_shallow(data):
        return BadRecord(f"it is nested more than {DEEPEST} deep")
    try:
        return json.loads(data)
    except ValueError as error:  # also a whole number of too many digits, and bytes that are no UTF-8
        return BadRecord(f"it is no JSON: {str(error)[: 2 * _SHOWN]}")
    except RecursionError:
        return BadRecord("it is nested too deep")


def is_shallow(data: bytes) -> bool:
    """Whether the lists and objects of a JSON text are nested at most `DEEPEST` deep."""
    if data.count(b"[") + data.count(b"{") <= DEEPEST:
        return True
    brackets = re.sub(_STRINGS, b"", data).translate(None, _NOT_BRACKETS)
    for _ in range(DEEPEST):  # each round removes the innermost pairs
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    opened = brackets.count(b"[") + brackets.count(b"{")
    is_torn = 2 * opened != len(brackets)  # this is no JSON; the JSON parser will give a better reason
    return not brackets or (is_torn and opened <= DEEPEST)
