"""What a `HostError` says, as one text in which nothing differs between machines."""

import re
from textwrap import dedent

import pytest

from ttlaunch.errors import HostError


def says(call, *, names):
    """The whole error that `call` raises, with `names` (value: name) in place of what differs."""
    with pytest.raises(HostError) as caught:
        call()
    error = caught.value
    lines = [f"{error.trouble}: {error.evidence}"]
    lines += [f"note: {note}" for note in error.notes] + [f"hint: {hint}" for hint in error.hints]
    text = "\n".join(lines)
    for value in sorted(names, key=len, reverse=True):
        text = text.replace(value, names[value])
    return re.sub(r"SHA256:[A-Za-z0-9+/]{43}", "SHA256:PRINT", text)


def expected(text):
    return dedent(text).strip()
