"""An extension of griffe: the doctests of a docstring are code, not the quotations for which Markdown takes them."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fence doctests before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
