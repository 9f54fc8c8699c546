"""The training text: its source, its digest, and the number of its sequences. No torch, no numpy.

The launcher reads it to check the data before anything starts, and each rank reads it again and compares digests.
"""

import hashlib
import sysconfig
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path

from ttlaunch.diagnostics.count import counted
from ttlaunch.errors import TtlaunchError
from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.system_reason import system_reason

TOKENS_MARK = "ttlaunch token ids, of a vocabulary of"
"""The beginning of the first line of a file of token ids; the size of the vocabulary follows it."""

DEFAULT_CORPUS_BYTES = 2 * 1024 * 1024
"""The largest size of the default corpus, which ends before the file that would exceed it."""


class CorpusReason(StrEnum):
    """The reason why a text cannot be used for training."""

    MISSING = "missing"
    EMPTY = "empty"
    BINARY = "binary"
    UNREADABLE = "unreadable"
    TOO_SHORT = "too_short"
    NO_RESPONSE = "no_response"
    NO_PACKAGE = "no_package"
    NO_IMAGE = "no_image"
    NO_TOKENS = "no_tokens"
    IMAGE_SIZE = "image_size"


class CorpusError(TtlaunchError):
    """The training text cannot be used.

    Attributes:
        reason: The rule that the text breaks.
        path: The file or folder at fault; None for the default corpus, or if the text as a whole is at fault.
        line: The line of `path` at fault, from 1; None if no single line is.
        package: The extra of ttlaunch that installs a missing package, if one is the reason.
        hint: The repair, if it is known.
    """

    def __init__(
        self,
        reason: CorpusReason,
        message: str,
        *,
        path: Path | None = None,
        line: int | None = None,
        package: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.package = package
        self.hint = f"`pip install 'ttlaunch[{package}]'`" if package else hint
        self.reason = reason
        self.path = path
        self.line = line


@dataclass(frozen=True)
class Corpus:
    """A text to train on.

    Attributes:
        name: The name for messages: the path, or what the default corpus is called.
        text: The text in UTF-8.
        sha256: The hash of `text`, in hexadecimal; the run does not start unless it is equal on every rank.
    """

    name: str
    text: bytes
    sha256: str

    @cached_property
    def characters(self) -> str:
        """Return the text as characters."""
        return self.text.decode()

    @cached_property
    def ids(self) -> "array[int]":
        """Return the tokens in a file that `ttlaunch data --tokenizer` made.

        Raises:
            CorpusError: The file has another format, or an id is outside the vocabulary.
        """
        _, _, body = self.text.partition(b"\n")
        if self.vocabulary_of_ids is None:
            message = f"no token ids in {self.name}: its first line is not `{TOKENS_MARK} NUMBER`"
            hint = "`ttlaunch data book.txt tokens.txt --tokenizer tokenizer.json` makes one for `data_path`"
            raise CorpusError(CorpusReason.NO_TOKENS, message, hint=hint)
        if body.translate(None, b" 0123456789\n"):
            raise CorpusError(CorpusReason.NO_TOKENS, f"{self.name} has more than token ids below its first line")
        ids = array("q", map(int, body.split()))
        if ids and max(ids) >= self.vocabulary_of_ids:
            message = f"{self.name} has token {max(ids)}, and its first line says there are {self.vocabulary_of_ids}"
            raise CorpusError(CorpusReason.NO_TOKENS, message)
        return ids

    @property
    def vocabulary_of_ids(self) -> int | None:
        """Return the number of distinct tokens from the first line of a file of ids; None for another file."""
        words = self.text.partition(b"\n")[0].decode(errors="replace").rsplit(" ", 1)
        return int(words[1]) if words[0] == TOKENS_MARK and words[-1].isascii() and words[-1].isdigit() else None


def read_corpus(path: Path | None) -> Corpus:
    """Read the training text.

    Args:
        path: A UTF-8 file, or a folder, whose files are read in sorted order, with those of sub-folders and without hidden
            ones. None for the default corpus: the sources of the interpreter's standard library (top level, sorted by
            name, about 2 MiB), which differ between versions of Python.

    Raises:
        CorpusError: The text is missing, empty, unreadable, or not UTF-8.
    """
    return _standard_library() if path is None else _read(path)


@cache
def _standard_library() -> Corpus:
    """Read the default corpus, once in a process: plans that follow each other use it, and ranks that share a process."""
    return _read(None)


def _read(path: Path | None) -> Corpus:
    name = "the standard library's sources" if path is None else str(path)
    try:
        files = _default_files() if path is None else list(_files_of(path))
        text = b"".join(_read_text(file) for file in files)
    except OSError as error:
        where = Path(error.filename) if error.filename else path
        raise CorpusError(
            CorpusReason.UNREADABLE, f"cannot read {where}: {system_reason(error)}", path=where
        ) from error
    if not text:
        raise CorpusError(CorpusReason.EMPTY, f"{name} has no text", path=path)
    return Corpus(name, text, hashlib.sha256(text).hexdigest())


def count_sequences(corpus: Corpus, cfg: TrainingFile) -> tuple[int, int]:
    """Return how many training and validation sequences the text gives.

    A sequence predicts `max_sequence_length` tokens and needs one more; sequences share that border token, so that
    every token but the first is predicted exactly once.

    Raises:
        CorpusError: The text gives no training or no validation sequence, or `num_epochs` passes do not fill one step.
    """
    training_tokens, validation_tokens = split_tokens(corpus, cfg)
    length = cfg.transformer_config.max_sequence_length
    training, validation = (max(0, tokens - 1) // length for tokens in (training_tokens, validation_tokens))
    training_config = cfg.training_config
    for kind, tokens, sequences in (
        ("training", training_tokens, training),
        ("validation", validation_tokens, validation),
    ):
        if not sequences:
            share = f"validation_fraction {training_config.validation_fraction:g}"
            total = counted(training_tokens + validation_tokens, "token")
            raise CorpusError(
                CorpusReason.TOO_SHORT,
                f"{corpus.name} has {total}; {share} leaves {tokens} for {kind}, "
                f"and one sequence needs {length} + 1 = {length + 1}",
            )
    check_epochs(corpus, cfg, training, kind="sequences")
    return training, validation


def check_epochs(corpus: Corpus, cfg: TrainingFile, count: int, *, kind: str) -> None:
    """Check that `num_epochs` passes over `count` training samples, called `kind` in the message, fill a step.

    Raises:
        CorpusError: The passes do not fill a step.
    """
    epochs, needed = cfg.training_config.num_epochs, cfg.training_config.sequences_per_step
    if epochs is not None and epochs * count < needed:
        raise CorpusError(
            CorpusReason.TOO_SHORT,
            f"{corpus.name} has {count} training {kind}; num_epochs {epochs} × {count} = {epochs * count}, "
            f"and one step needs {needed}",
        )


def spread_evenly(count: int, available: int) -> list[int]:
    """Return the indices of the `count` sequences, out of `available`, that a validation evaluates."""
    return [place * available // count for place in range(count)]


def split_tokens(corpus: Corpus, cfg: TrainingFile) -> tuple[int, int]:
    """Count the tokens for training and for validation, which gets the last `validation_fraction` of the text."""
    kind = cfg.training_config.tokenizer_type
    tokens = len(corpus.text if kind == "byte" else corpus.characters if kind == "char" else corpus.ids)
    validation = int(tokens * cfg.training_config.validation_fraction)
    return tokens - validation, validation


def _default_files() -> list[Path]:
    files, total = [], 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        total += file.stat().st_size
        if total > DEFAULT_CORPUS_BYTES:
            break
        files.append(file)
    return files


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file())
        visible = (file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))
        yield from sorted(visible)
    elif path.exists():
        raise CorpusError(CorpusReason.UNREADABLE, f"{path} is neither a file nor a folder", path=path)
    else:
        raise CorpusError(CorpusReason.MISSING, f"{path} does not exist", path=path)


def _read_text(file: Path) -> bytes:
    content = file.read_bytes()
    zero = content.find(b"\0")
    if zero >= 0:
        line = content.count(b"\n", 0, zero) + 1
        raise CorpusError(CorpusReason.BINARY, f"{file} is not text: line {line} has a zero byte", path=file, line=line)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"0x{content[error.start]:02x}"
        raise CorpusError(
            CorpusReason.BINARY, f"{file} is not UTF-8: line {line} has the byte {found}", path=file, line=line
        ) from error
    return content
