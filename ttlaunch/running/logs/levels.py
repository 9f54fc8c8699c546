"""Judge the level of what a rank prints, in one way for the page and for servers of logs.

A line has the level that it names where loggers write one; the lines of a traceback are errors; all others have that of their stream.
"""

from typing import Final

from ttlaunch.quick_pattern import quick_pattern

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LEVEL_NAMES = {"WARN": "WARNING", "FATAL": "CRITICAL", "TRACE": "DEBUG"}
_LEVEL = r"(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL|TRACE)"
_COLOUR = quick_pattern(rb"\x1b\[[0-9;]*m")
_FIRST = quick_pattern((r"[\W\d_TZ]*?\b" + _LEVEL + r"(?=[\s\])>:|-]|$)").encode())
"""A level at the beginning of a line, or after a time: `INFO:root:hello`, `2026-01-01T00:00:00Z [INFO] hello`."""
_BETWEEN = quick_pattern((r".{0,120}?(?:\||\s-|\[|\()\s*" + _LEVEL + r"\s*(?:\||-\s|\]|\)|:)").encode())
"""A level between separators: `12:00:01 | trainer | INFO | hello`."""
_NAMED = quick_pattern(rb"(?:.{0,120}?\s)?level=\"?(debug|info|warn|warning|error|critical|fatal|trace)\b")
_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
_SEARCHED = 400


class LevelJudge:
    """Judges the lines of one stream of one rank, which come in their order."""

    def __init__(self, stream: str) -> None:
        self._usual = "WARNING" if stream == "stderr" else "INFO"
        self._is_inside = False

    def level(self, line: bytes) -> str:
        """Return the level of the next line, one of `LEVELS`."""
        text = _COLOUR.sub(b"", line[:_SEARCHED])
        if _TRACEBACK in text:
            self._is_inside = True
            return "ERROR"
        if self._is_inside:
            # The first line of a traceback that is not indented is the exception; another traceback may be chained to it.
            self._is_inside = text[:1] in {b" ", b"\t", b"|", b"+"}
            return "ERROR"
        if text.startswith(_CHAINED):
            return "ERROR"
        own = _FIRST.match(text) or _BETWEEN.match(text) or _NAMED.match(text)
        if own is None:
            return self._usual
        name = own[1].decode().upper()
        return _LEVEL_NAMES.get(name, name)
