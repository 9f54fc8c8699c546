"""Regular expressions for modules that every command imports: each is compiled when it is first used.

A start of a run imports a few hundred expressions and uses a few dozen; to compile all took 15 ms, as long as Python's own start.
"""

import re
from typing import Any, AnyStr, cast


def quick_pattern(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return what `re.compile` returns, as far as its methods and attributes go; a mistake in the text shows at the first use.

    It is no instance of `re.Pattern`, so functions of `re` do not take it: call its methods.
    """
    return cast("re.Pattern[AnyStr]", _Uncompiled(text, flags))


class _Uncompiled:
    """Has the methods and attributes of a compiled expression, each from its first use on."""

    def __init__(self, text: str | bytes, flags: int) -> None:
        self._text, self._flags = cast("str", text), flags  # or bytes, which are compiled alike

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # such as those that `copy` and `inspect` look for
        value = getattr(re.compile(self._text, self._flags), name)
        setattr(self, name, value)
        return value

    def __repr__(self) -> str:
        return f"quick_pattern({self._text!r})"
