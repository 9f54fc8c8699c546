"""`dataclass` for modules that every command imports.

The standard decorator compiles six functions for each class while its module is imported: a third of a millisecond a class, and a
run imports more than a hundred of them. This one has the standard decorator find the fields, gives all classes the same functions
for equality, text and hash, and compiles the constructor of a class when its first instance is made. Instances, `field`,
`fields`, `replace` and `asdict` are those of `dataclasses`; slots, order and `InitVar` need the standard decorator. A class without a
docstring gets its name as one.
"""

import dataclasses
import functools
import reprlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - for type checkers there is no difference
else:

    def dataclass(cls: Any = None, /, *, frozen: bool = False, kw_only: bool = False) -> Any:
        """Do what `dataclasses.dataclass` does."""
        if cls is None:
            return lambda decorated: dataclass(decorated, frozen=frozen, kw_only=kw_only)
        own = set(vars(cls))
        cls.__doc__ = (
            cls.__doc__ or cls.__name__
        )  # the standard decorator would make one of the constructor's signature
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)

        def construct(self: Any, *values: Any, **named: Any) -> None:
            cls.__init__ = _constructor(cls)
            cls.__init__(self, *values, **named)

        functions: dict[str, Any] = {"__init__": construct, "__repr__": _text, "__eq__": _equal}
        if "__hash__" not in own or "__eq__" in own:  # Python adds `__hash__ = None` to a class with `__eq__`
            functions["__hash__"] = _hash if frozen else None
        if frozen:
            functions |= {"__setattr__": _refuse_assignment, "__delattr__": _refuse_deletion}
        for name, function in functions.items():
            if name not in own or name == "__hash__":
                setattr(cls, name, function)
        return cls


def _constructor(cls: type) -> Any:
    """Compile the constructor of a class from its fields."""
    names: dict[str, Any] = {"_set": object.__setattr__, "_missing": dataclasses.MISSING}
    positional, keyword, body = ["self"], ["*"], []
    for place, one in enumerate(dataclasses.fields(cls)):
        parameter = value = one.name
        if one.default is not dataclasses.MISSING:
            names[f"_default_{place}"] = one.default
            parameter += f"=_default_{place}"
        elif one.default_factory is not dataclasses.MISSING:
            names[f"_make_{place}"] = one.default_factory
            parameter += "=_missing"
            value = f"_make_{place}() if {one.name} is _missing else {one.name}" if one.init else f"_make_{place}()"
        if one.init:
            (keyword if one.kw_only else positional).append(parameter)
        elif value == one.name:  # its default is in the class, or it has none
            continue
        body.append(f"_set(self, {one.name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(positional + (keyword if len(keyword) > 1 else []))
    exec(f"def __init__({parameters}):\n  " + "\n  ".join(body or ["pass"]), names)  # noqa: S102 - only names of fields
    names["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    return names["__init__"]


@functools.cache
def _compared(cls: Any) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(cls) if one.compare)


@functools.cache
def _hashed(cls: Any) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(cls) if (one.compare if one.hash is None else one.hash))


@reprlib.recursive_repr()
def _text(self: Any) -> str:
    values = (f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(values)})"


def _equal(self: Any, other: Any) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    names = _compared(self.__class__)
    # As tuples, for which an object equals itself even if it is not a number.
    return tuple(getattr(self, name) for name in names) == tuple(getattr(other, name) for name in names)


def _hash(self: Any) -> int:
    return hash(tuple(getattr(self, name) for name in _hashed(self.__class__)))


def _refuse_assignment(self: Any, name: str, value: object) -> None:
    if "__dataclass_fields__" in vars(type(self)) or name in type(self).__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _refuse_deletion(self: Any, name: str) -> None:
    if "__dataclass_fields__" in vars(type(self)) or name in type(self).__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)
