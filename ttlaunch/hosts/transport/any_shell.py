"""Command lines that mean the same to every login shell, and output without what that shell prints by itself.

sshd hands a command to the user's login shell, which may be csh or fish and whose start-up files may print a greeting.
So the command is quoted in the way that all shells agree on, and announces itself with a mark: what comes before the
mark is not its output.
"""

import secrets

MOST_NOISE = 1024 * 1024
_LITERAL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _./:=,@+-;|&<>()[]{}*?~#^%")
_LITERAL_IN_QUOTES = _LITERAL | frozenset('"$`')


def make_mark() -> str:
    """A word that no greeting contains."""
    return secrets.token_hex(12)


def wrap_command(command: str, *, mark: str) -> str:
    """A command line for any login shell that prints `mark` on both streams and does `command` in /bin/sh."""
    announce = f"printf {mark}; printf {mark} >&2"
    if set(command) <= _LITERAL_IN_QUOTES:
        return f"exec /bin/sh -c '{announce}; {command}'"
    # Single quotes, backslashes, `!` and newlines mean something to one shell or another even between single quotes.
    return f'exec /bin/sh -c \'{announce}; eval "$(printf %b "{as_printf_text(command)}")"\''


def as_printf_text(text: str) -> str:
    """A line that `printf %b` turns into `text`, of characters that mean nothing to any shell between double quotes."""
    return "".join(character if character in _LITERAL else _octal(character) for character in text)


class AfterMark:
    """Drops everything in a stream up to and including the mark.

    Attributes:
        noise: What came before the mark, or all of it as long as the mark has not come.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self.passed = False
        self.noise = b""

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` that the command printed."""
        if self.passed:
            return data
        self.noise, found, rest = (self.noise + data).partition(self._mark)
        self.passed = bool(found)
        return rest

    @property
    def too_much(self) -> bool:
        return len(self.noise) > MOST_NOISE


def _octal(character: str) -> str:
    return "".join(f"\\0{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))
