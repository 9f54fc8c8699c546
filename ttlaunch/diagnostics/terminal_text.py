"""Make other people's text safe for a terminal: one table of characters, and the two functions that apply it.

Host names, file names, exception texts and the output of ranks come from hosts, files and programs that may be hostile.
Control characters in them move the cursor, set the title, hide text or reverse its order. `clean` is for text inside a
line of ours, `clean_output` for a line that a rank printed. JSON needs neither, because it escapes these characters.
"""

import re

from ttlaunch.quick_pattern import quick_pattern

_STEERING = (
    r"\x00-\x1f\x7f"  # C0 and DEL
    r"\x80-\x9f"  # C1: some begin the same sequences as ESC [ and ESC ]
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of the text
    r"\u2028\u2029"  # some programs end a line at these
    r"\ud800-\udfff"  # surrogates, which Python uses for bytes that are not UTF-8
    r"\U000e0000-\U000e007f"  # tags: they can spell invisible sentences
)
"""Characters that no terminal may receive."""

_INVISIBLE = (
    r"\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065\u206a-\u206f\u3164\ufe00-\ufe0f\ufeff"
    r"\uffa0\ufff9-\ufffb\U000e0080-\U000e0fff"  # no width
    r"\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd\U00013430-\U0001345f"  # drawn around or over other characters
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # control characters of shorthand and of music
    r"\xa0\u1680\u2000-\u200a\u202f\u205f\u3000"  # other spaces than the ASCII one
)
"""Characters that can make two different names look the same; a rank's output may need them."""

_IN_A_LINE = quick_pattern(f"[{_STEERING}{_INVISIBLE}]")
_IN_OUTPUT = quick_pattern(f"[{_STEERING}]")
_SEQUENCE = quick_pattern(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # cursor, erasing, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # title, links, clipboard, device control
)
_PLAIN = quick_pattern(rb"[\t -~]*\Z")
_RESET = "\x1b[0m"


def clean(text: str) -> str:
    r"""Replace every character that controls a terminal or is invisible, also a line end, by its Python escape: `\x1b`."""
    return _IN_A_LINE.sub(_visible, text)


def clean_output(line: bytes, *, colour: bool) -> bytes:
    r"""Return a line that a rank printed as a terminal may receive it: text, tabs and, with `colour`, colours.

    The line ends its own colours. If the line redraws itself with `\r`, the last state is kept, as on a terminal.
    Sequences that do more than colour are dropped, and control characters outside of sequences are shown as in `clean`.

    >>> clean_output(b"50 %\r100 %\x1b]0;title\x07 \x1b[1mdone\x1b[2J", colour=False)
    b'100 % done'
    """
    if _PLAIN.match(line):
        return line
    text = line.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
    parts, position, has_colours = [], 0, False
    for found in _SEQUENCE.finditer(text):
        parts.append(_IN_OUTPUT.sub(_visible_but_tab, text[position : found.start()]))
        position = found.end()
        if colour and found["colour"]:
            parts.append(found["colour"])
            has_colours = True
    parts.append(_IN_OUTPUT.sub(_visible_but_tab, text[position:]))
    return ("".join(parts) + (_RESET if has_colours else "")).encode()


def _visible(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


def _visible_but_tab(found: re.Match[str]) -> str:
    return found[0] if found[0] == "\t" else _visible(found)
