"""Frozen dataclasses made of JSON that somebody else sent: the check of each field is in its annotation.

`Annotated[int, whole(1, 8)]` is a whole number from 1 to 8. A check returns the value as the field keeps it, or raises `UnfitError`; `build`
checks all fields and says which one broke its rule. The messages of a serving run and the bodies of its HTTP requests are both
read this way. Standard library only.
"""

import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Final, TypeAlias, TypeVar, get_type_hints

MOST: Final = 2**53
"""Largest whole number that every reader of JSON keeps exactly."""

_LONGEST_NAME: Final = 200
_LONGEST_NAMED: Final = 1024
_MOST_NAMED: Final = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")

Check: TypeAlias = Callable[[Any], Any]
Made = TypeVar("Made")


class UnfitError(ValueError):
    """A value that breaks the rule of its field, with the path to it, such as `messages[2].role`."""

    def __init__(self, rule: str, *, path: str = "", hint: str | None = None) -> None:
        super().__init__(f"`{path}`: {rule}" if path else rule)
        self.rule = rule
        self.path = path
        self.hint = hint

    def inside(self, step: str) -> "UnfitError":
        """This mistake, seen from one level further out."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return UnfitError(self.rule, path=f"{step}{joint}{self.path}", hint=self.hint)


def whole(least: int, most: int = MOST) -> Check:
    """A whole number, and no truth value."""

    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise UnfitError(f"expected a whole number from {least} to {most}")
        return value

    return check


def decimal(least: float, most: float) -> Check:
    """A finite number."""

    def check(value: Any) -> float:
        if type(value) not in {int, float} or not math.isfinite(value) or not least <= value <= most:
            raise UnfitError(f"expected a number from {least:g} to {most:g}")
        return float(value)

    return check


def string(longest: int = 1 << 20) -> Check:
    """A text that UTF-8 can hold."""

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > longest:
            raise UnfitError(f"expected a text of at most {longest} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UnfitError("expected a text without lone surrogates") from None
        return value

    return check


def one_of(*allowed: str) -> Check:
    """One of these texts."""

    def check(value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise UnfitError(f"expected one of {', '.join(allowed)}")
        return value

    return check


def truth(value: Any) -> bool:
    if type(value) is not bool:
        raise UnfitError("expected true or false")
    return value


def sha256(value: Any) -> str:
    if type(value) is not str or not _SHA256.fullmatch(value):
        raise UnfitError("expected 64 hexadecimal digits")
    return value


def or_none(inner: Check) -> Check:
    """What `inner` takes, or null."""
    return lambda value: None if value is None else inner(value)


def list_of(inner: Check, most: int) -> Check:
    """A list, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) not in {list, tuple} or len(value) > most:
            raise UnfitError(f"expected a list of at most {most} values")
        try:
            return tuple([inner(one) for one in value])
        except UnfitError:  # again, and slower, for the place
            return tuple(_item(inner, place, one) for place, one in enumerate(value))

    return check


def _item(inner: Check, place: int, value: Any) -> Any:
    try:
        return inner(value)
    except UnfitError as unfit:
        raise unfit.inside(f"[{place}]") from None


def named_numbers(value: Any) -> dict[str, int]:
    if type(value) is not dict or len(value) > _MOST_NAMED:
        raise UnfitError(f"expected at most {_MOST_NAMED} named numbers")
    name, amount = string(_LONGEST_NAME), whole(-MOST)
    return {name(key): amount(one) for key, one in value.items()}


def named_texts(value: Any) -> dict[str, str]:
    """Check a few texts by name."""
    if type(value) is not dict or len(value) > _MOST_NAMED:
        raise UnfitError(f"expected at most {_MOST_NAMED} named texts")
    name, text = string(_LONGEST_NAME), string(_LONGEST_NAMED)
    return {name(key): text(one) for key, one in value.items()}


def object_of(made: type) -> Check:
    """Check a dataclass inside a message: an object with exactly its fields."""

    def check(value: Any) -> Any:
        if type(value) is made:
            return value
        if type(value) is not dict:
            raise UnfitError("expected an object")
        return build(made, value)

    return check


@functools.cache
def _fields_of(made: type) -> tuple[dict[str, Check], frozenset[str]]:
    """The check of each field, and the fields without a default."""
    checks = {name: hint.__metadata__[0] for name, hint in get_type_hints(made, include_extras=True).items()}
    return checks, frozenset(one.name for one in fields(made) if one.default is MISSING)


def build(made: type[Made], values: Mapping[str, Any]) -> Made:
    """Make a dataclass of what was sent: all its fields without a default, and no others.

    Raises:
        UnfitError: For the first field that is unknown (with the nearest known name as its hint), missing, or wrong.
    """
    own: Any = made  # for mypy, which does not take a generic class for hashable
    checks, required = _fields_of(own)
    if not values.keys() <= checks.keys():
        name = next(name for name in values if name not in checks)
        near = difflib.get_close_matches(name, checks, n=1)
        hint = f"did you mean `{near[0]}`?" if near else None
        raise UnfitError("is not a known key", path=name[:_LONGEST_NAME], hint=hint)
    if missing := required - values.keys():
        raise UnfitError("is missing", path=min(missing))
    taken = {}
    for name, value in values.items():
        try:
            taken[name] = checks[name](value)
        except UnfitError as unfit:
            raise unfit.inside(name) from None
    return made(**taken)
