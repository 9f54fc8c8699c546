"""Single random edits of a text, such as a slip of the hand makes: a number, word, list element or line, changed, gone or doubled."""

import random
import re

_TOKEN = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|[A-Za-z_$][\w$.-]*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?\Z")
_LIST = re.compile(r"\[[^\[\]\n]*\]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"


def edit(text: str, random_: random.Random) -> tuple[str, str] | None:
    """One edit.

    Returns:
        The text after it, and the edit in words; None if nothing changed.
    """
    way = random_.choice((_change_token, _change_token, _change_token, _change_element, _change_line))
    changed = way(text, random_)
    return None if changed is None or changed[0] == text else changed


def _change_token(text: str, random_: random.Random) -> tuple[str, str] | None:
    tokens = [match for match in _TOKEN.finditer(text) if not _in_comment(text, match.start())]
    if not tokens:
        return None
    token = random_.choice(tokens)
    others = sorted({match.group() for match in tokens})
    old = token.group()
    new = _other_number(old, random_) if _NUMBER.match(old) else _other_word(old, others, random_)
    return _replaced(text, token.start(), token.end(), new)


def _other_number(old: str, random_: random.Random) -> str:
    digit = random_.randrange(len(old))
    ways = [f"-{old}", "", "0", f"{old}0", f"{old}.5", old[:digit] + old[digit + 1 :], old.replace("e-", "e")]
    ways += [old[:digit] + str(random_.randrange(10)) + old[digit + 1 :], str(random_.randrange(100))]
    if old.lstrip("-").isdigit():
        ways += [str(int(old) + 1), str(int(old) - 1), str(int(old) * 2)]
    return random_.choice(ways)


def _other_word(old: str, others: list[str], random_: random.Random) -> str:
    at = random_.randrange(len(old))
    swapped = old[:at] + old[at : at + 2][::-1] + old[at + 2 :]
    ways = ["", old + old, old[:at] + old[at + 1 :], swapped, old[:at] + old[at] + old[at:], old.swapcase()]
    ways += [old[:at] + random_.choice(_LETTERS) + old[at + 1 :], random_.choice(others), random_.choice(others)]
    return random_.choice(ways)


def _change_element(text: str, random_: random.Random) -> tuple[str, str] | None:
    lists = [match for match in _LIST.finditer(text) if not _in_comment(text, match.start())]
    if not lists:
        return None
    written = random_.choice(lists)
    items = written.group()[1:-1].split(",")
    at = random_.randrange(len(items))
    ways = [items[:at] + items[at + 1 :], [*items[:at], items[at], *items[at:]], items[::-1]]
    return _replaced(text, written.start(), written.end(), f"[{','.join(random_.choice(ways))}]")


def _change_line(text: str, random_: random.Random) -> tuple[str, str] | None:
    lines = text.splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    at = random_.choice(numbers)
    if random_.random() < 0.5:
        return "".join(lines[:at] + lines[at + 1 :]), f"line {at + 1} removed: {lines[at].strip()}"
    return "".join([*lines[:at], lines[at], *lines[at:]]), f"line {at + 1} doubled: {lines[at].strip()}"


def _replaced(text: str, start: int, end: int, new: str) -> tuple[str, str]:
    line = text.count("\n", 0, start) + 1
    return text[:start] + new + text[end:], f"line {line}: `{text[start:end]}` -> `{new}`"


def _in_comment(text: str, place: int) -> bool:
    return "#" in text[text.rfind("\n", 0, place) + 1 : place]
