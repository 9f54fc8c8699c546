"""What a ttlaunch command has answered that another one started with `--format json`."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

_ERROR = "error"


def parse_answer(text: str) -> dict[str, Any]:
    """The object on its standard output; empty if there is none."""
    with contextlib.suppress(ValueError):
        content = json.loads(text)
        return content if isinstance(content, dict) else {}
    return {}


def why_it_failed(answer: Mapping[str, Any], err: str, *, status: int, longest: int) -> str:
    """One line: what its own diagnostics say, else its last words.

    Args:
        answer: As it was parsed.
        err: Its standard error.
        status: It ended with.
        longest: So many characters at the most.
    """
    diagnostics = answer.get("diagnostics") or [answer.get("failure") or {}]
    errors = [one for one in diagnostics if one.get("severity", _ERROR) == _ERROR]
    message = (errors or diagnostics)[0].get("message")
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "")
    return str(message or last or f"it ended with status {status}")[:longest]
