"""The tokenizer and the chat template that came with a model, and texts as its tokens.

All of it may come from anybody: `tokenizer.json` is read by a limited child, which takes only parts that need time and memory
in proportion to a text (`untrusted/tokenizer.py`), and the same child encodes the text of a training.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch.diagnostics import shown
from ttlaunch.records.parser import BadRecord, Count, Flag, load, parse, record
from ttlaunch.records.regular_files import open_regular
from ttlaunch.running.pretrained.read_folder import PretrainedError, read_object
from ttlaunch.untrusted.child import CPU_S, MEMORY, Child, MissingLibraryError, UntrustedError

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
"""The tokens by whose names a chat template asks for them."""
_LONGEST_TEMPLATE = 2**18
_LARGEST = 64 * 2**20
_LARGEST_ANSWER = 2**16
_BYTES_A_CPU_SECOND = 100_000
"""Bytes of text that any machine encodes in a second of processor time."""
_CHUNK = 2**18
"""Characters that are encoded at once, at least."""
_BYTES_A_CHARACTER = 256
"""Bytes of memory for a character of a text that is encoded at once."""
_BEFORE = 64
"""Characters before these that are encoded with them, and left out again."""


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer that is safe to use.

    Attributes:
        path: Its file.
        sha256: The hash of the file.
        vocabulary: One more than the largest number of a token.
        special: Texts of special tokens by `SPECIAL`.
        ends: The numbers of the tokens that end a text.
        template: The chat template; None without one.
    """

    path: Path
    sha256: str
    vocabulary: int
    special: Mapping[str, str]
    ends: tuple[int, ...]
    template: str | None


@record
class _Facts:
    """What the limited child says of a file."""

    vocabulary: Count
    largest: Count
    numbers: tuple[Count | None, ...]
    is_known: Flag

    @property
    def tokens(self) -> int:
        """Return one more than the largest number of a token."""
        return max(self.vocabulary, self.largest + 1)


def read_tokenizer(folder: Path) -> FoundTokenizer:
    """Read the tokenizer of a folder.

    Raises:
        OSError: A file cannot be read.
        PretrainedError: The folder has none, or one that is not taken.
    """
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    if "auto_map" in settings:
        raise PretrainedError(f"{SETTINGS}: `auto_map` asks for code that comes with the model, which is never run")
    special = {name: text for name in SPECIAL if (text := _text_of(settings.get(name)))}
    path = folder / TOKENIZER
    with open_regular(path, follow=True) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            with Child("tokenizer", file=file) as child:
                child.send({"tokens": [special.get("eos_token", "")]}, is_last=True)
                facts = parse(_Facts, load(child.answer(_LARGEST_ANSWER)))
        except UntrustedError as error:
            raise PretrainedError(f"{TOKENIZER}: {error}") from error
    if isinstance(facts, BadRecord):
        raise PretrainedError(f"{TOKENIZER}: {facts.reason}")
    ends = tuple(number for number in facts.numbers if number is not None)
    template = _template_of(folder, settings)
    _check_template(template)
    return FoundTokenizer(path, digest, facts.tokens, special, ends, template)


def encode_text(text: str, tokenizer: Path) -> Iterator[array[int]]:
    """Yield the tokens of a text, piece by piece, without special tokens at its ends.

    Args:
        text: The text.
        tokenizer: A `tokenizer.json`.

    Cost: a child's; the limit of its processor time grows with the text.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: It is no tokenizer that is taken, or it has no tokens for the text.
    """
    with _encoder(tokenizer, characters=len(text)) as child:
        child.send({"tokens": []})
        child.line()
        for before, piece in _pieces(text):
            yield _encoded(child, before, piece, ends="")


def encode_texts(texts: Sequence[str], tokenizer: Path) -> tuple[int, list[array[int]]]:
    """Return the number of tokens of a tokenizer, and the tokens of each text, with those that the tokenizer puts at its ends.

    Nothing else uses the file, so it may have any parts. A text is then encoded at once, because where it may be cut is not known.

    Args:
        texts: The texts.
        tokenizer: A `tokenizer.json`.

    Cost: as that of `encode_text`; of unknown parts, memory for the tokens of the longest text.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: It is no tokenizer, it has no tokens for a text, or takes too much time or memory for it.
    """
    characters, longest = sum(map(len, texts)), max(map(len, texts), default=0)
    with _encoder(tokenizer, characters=characters, memory=MEMORY + _BYTES_A_CHARACTER * longest) as child:
        child.send({"tokens": [], "takes_any": True})
        facts = parse(_Facts, load(child.line()))
        if isinstance(facts, BadRecord):
            raise UntrustedError(facts.reason)
        found = []
        for text in texts:
            pieces = list(_pieces(text)) if facts.is_known else [("", text)]
            ids = array("I")
            for number, (before, piece) in enumerate(pieces, start=1):
                ends = {(True, True): "both", (True, False): "begin", (False, True): "end"}
                ids += _encoded(child, before, piece, ends=ends.get((number == 1, number == len(pieces)), ""))
            found.append(ids)
        return facts.tokens, found


@contextmanager
def _encoder(tokenizer: Path, *, characters: int, memory: int = MEMORY) -> Iterator[Child]:
    with open_regular(tokenizer, follow=True) as file:
        cpu_s = CPU_S + characters // _BYTES_A_CPU_SECOND
        with Child("tokenizer", file=file, cpu_s=cpu_s, memory=memory, wall_s=60.0 + 20.0 * cpu_s) as child:
            yield child


def _encoded(child: Child, before: str, piece: str, *, ends: str) -> array[int]:
    child.send({"text": before + piece, "skip": len(before), "ends": ends})
    count = int.from_bytes(b"".join(child.pieces(4)), "little")
    return array("I", b"".join(child.pieces(4 * count)))


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Cut a text where every tokenizer that is taken cuts it too: between a letter or digit and a line break.

    A tokenizer that cuts nowhere could join the two; none that was made for texts of several lines has such a token. With
    each piece comes some of the text before it, because a tokenizer may begin a text otherwise than it goes on, as with a space.
    """
    start = 0
    if not text:
        yield "", ""
    while start < len(text):
        end = text.find("\n", start + _CHUNK)
        while end >= 0 and not text[end - 1].isalnum():
            end = text.find("\n", end + 1)
        end = len(text) if end < 0 else end
        yield text[max(0, start - _BEFORE) : start], text[start:end]
        start = end


def _text_of(token: Any) -> str | None:
    """Return the text of a token, which may be in an object of its own."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def has_template(folder: Path) -> bool:
    """Whether a folder has a chat template.

    Raises:
        OSError, PretrainedError: The settings of its tokenizer cannot be read.
    """
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    return (folder / TEMPLATE).exists() or settings.get("chat_template") is not None


def _check_template(template: str | None) -> None:
    """Refuse a chat template that is no program in Jinja; without the library, this is not known before a chat."""
    if template is None:
        return
    try:
        with Child("chat") as child:
            child.send({"template": template}, is_last=True)
            child.answer()
    except MissingLibraryError:
        return
    except UntrustedError as error:
        raise PretrainedError(f"{TEMPLATE}: {error}") from error


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template: that of its own file, or that among the settings, of several the one named `default`."""
    if (folder / TEMPLATE).exists():
        with open_regular(folder / TEMPLATE, follow=True) as file:
            data = file.read(_LONGEST_TEMPLATE + 1)
        try:
            found: Any = data.decode()
        except UnicodeDecodeError as error:
            raise PretrainedError(f"{TEMPLATE}: it is not UTF-8") from error
    else:
        found = settings.get("chat_template")
        if isinstance(found, list):
            named = [one.get("template") for one in found if isinstance(one, dict) and one.get("name") == "default"]
            found = named[0] if named else None
    if found is not None and not isinstance(found, str):
        raise PretrainedError(f"{SETTINGS}: `chat_template` is {shown(repr(found))[:60]}, and no text")
    if found is not None and len(found) > _LONGEST_TEMPLATE:
        raise PretrainedError(f"the chat template has more than {_LONGEST_TEMPLATE >> 10} KiB")
    return found
