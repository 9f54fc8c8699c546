"""Make tokens of a training text with the tokenizer of a model, before anything starts: hosts and ranks need only the tokens.

The file of tokens is kept in the user's cache under a name that says what it was made of, so a second start makes it no more.
"""

from __future__ import annotations

import hashlib
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch.diagnostics import file_error, shown, usage_error
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.running.pretrained.read_tokenizer import FoundTokenizer
    from ttlaunch.spec.recipe.config import LoadedConfig
    from ttlaunch.spec.recipe.corpus import Corpus

EXTRA = "`pip install 'ttlaunch[pretrained]'`"
_BYTES = 256
_FOLDER = "hf:"
_FORMAT = 1
_LONGEST = 300


def tokenizer_keys(folder: Path) -> list[str]:
    """Return the keys by which the text of a training becomes tokens of the tokenizer in a folder; none without one.

    The bytes of our own models need no library, so a folder that was exported from one trains without it.

    Raises:
        PretrainedError: The tokenizer is not taken.
    """
    from ttlaunch.running.pretrained.read_folder import PretrainedError
    from ttlaunch.running.pretrained.read_tokenizer import TOKENIZER, read_tokenizer

    if not (folder / TOKENIZER).exists():
        return []
    try:
        if is_byte_tokenizer(folder):
            return []
        found = read_tokenizer(folder)
    except OSError as error:
        raise PretrainedError(f"{TOKENIZER}: {system_reason(error)}") from error
    keys = {
        "tokenizer_type": "ids",
        "tokenizer_path": _quoted(str(found.path)),
        "tokenizer_sha256": _quoted(found.sha256),
    }
    return [f"training_config.{key}={value}" for key, value in keys.items()]


def is_byte_tokenizer(folder: Path) -> bool:
    """Whether the tokenizer in a folder is that of our own models of bytes.

    Raises:
        OSError: It cannot be read.
        PretrainedError: It is no JSON, or too large.
    """
    from ttlaunch.running.pretrained.read_folder import read_object
    from ttlaunch.running.pretrained.read_tokenizer import TOKENIZER
    from ttlaunch.running.pretrained.tokenizer_json import tokenizer_json

    return read_object(folder / TOKENIZER) == tokenizer_json("byte", vocabulary=_BYTES)


def _quoted(text: str) -> str:
    """Write a text as YAML."""
    return "'" + text.replace("'", "''") + "'"


def is_text_for_a_tokenizer(config: Any, corpus: Corpus) -> bool:
    """Whether a text still has to become tokens: the configuration names a tokenizer, and the data are no tokens yet."""
    training = config.training_config
    wanted = training.tokenizer_type == "ids" and training.tokenizer_path is not None
    return bool(wanted and config.data_config.source == "file" and corpus.vocabulary_of_ids is None)


def tokenize_corpus(loaded: LoadedConfig, corpus: Corpus, working_folder: Path) -> Path:
    """Return a file with the tokens of a text, which `tokenizer_type: ids` reads.

    Raises:
        CorpusError: The tokenizer is not taken, is another one than the configuration says, or has no tokens for the text.
    """
    from ttlaunch.running.pretrained.read_folder import PretrainedError
    from ttlaunch.running.pretrained.read_tokenizer import encode_text
    from ttlaunch.spec.recipe.corpus import TOKENS_MARK, CorpusError, CorpusReason
    from ttlaunch.untrusted.child import UntrustedError

    config = loaded.checked.model_dump()
    where = str(config["training_config"]["tokenizer_path"])
    try:
        found = named_tokenizer(where, config["training_config"]["tokenizer_sha256"], working_folder)
        rows = _rows_of_model(loaded, working_folder) or found.vocabulary
        made_of = f"{_FORMAT} {corpus.sha256} {found.sha256} {rows}"
        file = _cache() / f"{hashlib.sha256(made_of.encode()).hexdigest()}.txt"
        if not file.exists():
            head = f"{TOKENS_MARK} {rows}\n".encode()
            _write(file, head, encode_text(corpus.characters, found.path))
    except (UntrustedError, PretrainedError) as error:
        message = f"{shown(where, longest=_LONGEST)} makes no tokens of {corpus.name}: {error}"
        hint = EXTRA if "not installed" in str(error) else None
        raise CorpusError(CorpusReason.NO_TOKENS, message, hint=hint) from error
    except OSError as error:
        message = f"{shown(error.filename or where, longest=_LONGEST)}: {system_reason(error)}"
        raise CorpusError(CorpusReason.NO_TOKENS, message) from error
    return file


def tokens_of_texts(texts: Sequence[str], tokenizer: Path) -> bytes:
    """Return the tokens of texts, one after the other, as a file for `tokenizer_type: ids`.

    Args:
        texts: The texts; each is encoded by itself, with the special tokens that the tokenizer puts at its ends.
        tokenizer: A `tokenizer.json`, which a limited child reads.

    Raises:
        CorpusError: The library that reads it is not installed.
        LaunchError: The file cannot be read, or is no tokenizer.
    """
    from ttlaunch.running.pretrained.read_tokenizer import encode_texts
    from ttlaunch.spec.recipe.adapters import need_package
    from ttlaunch.spec.recipe.corpus import TOKENS_MARK
    from ttlaunch.untrusted.child import UntrustedError

    need_package("tokenizers")
    try:
        tokens, rows = encode_texts(texts, tokenizer)
    except OSError as error:
        raise file_error(tokenizer, error, verb="read") from error
    except UntrustedError as error:
        raise usage_error(f"{shown(tokenizer, longest=_LONGEST)} makes no tokens of the texts: {error}") from error
    lines = (" ".join(map(str, row)) for row in rows if row)
    return "\n".join([f"{TOKENS_MARK} {tokens}", *lines, ""]).encode()


def named_tokenizer(where: str, sha256: str | None, working_folder: Path) -> FoundTokenizer:
    """Read the tokenizer at a path that a configuration has.

    Args:
        where: The path of its `tokenizer.json`.
        sha256: The hash that the file must have; None for any.
        working_folder: The folder to which relative paths are relative.

    Raises:
        OSError: A file cannot be read.
        PretrainedError: It is not taken, or has another hash.
    """
    from ttlaunch.running.pretrained.read_folder import PretrainedError
    from ttlaunch.running.pretrained.read_tokenizer import TOKENIZER, read_tokenizer

    path = working_folder / os.path.expanduser(where)  # noqa: PTH111 - never raises
    if path.name != TOKENIZER:
        raise PretrainedError(f"the file of a tokenizer is called {TOKENIZER}")
    found = read_tokenizer(path.parent)
    if sha256 is not None and found.sha256 != sha256:
        raise PretrainedError(f"it has changed: its SHA-256 is {found.sha256[:12]}…, and {sha256[:12]}… is meant")
    return found


def _rows_of_model(loaded: LoadedConfig, working_folder: Path) -> int | None:
    """Return the tokens of the model with which the training begins, which may be more than its tokenizer has."""
    from ttlaunch.app.import_weights import find_pretrained

    folder = folder_of(loaded, working_folder)
    return find_pretrained(str(folder)).vocabulary if folder else None


def folder_of(loaded: LoadedConfig, working_folder: Path) -> Path | None:
    """Return the folder that `initial_weights` names; None if it names a file, or nothing."""
    from ttlaunch.spec.recipe.sections import TrainingFile

    if not isinstance(loaded.config, TrainingFile):
        return None
    weights = loaded.config.checkpoint_config.initial_weights or ""
    if not weights.startswith(_FOLDER):
        return None
    return working_folder / os.path.expanduser(weights.removeprefix(_FOLDER))  # noqa: PTH111 - never raises


def _cache() -> Path:
    """Return the folder of tokens in the user's cache; only the user can read it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - never raises
    folder = Path(base) / "ttlaunch" / "tokens"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(1, "it belongs to another user", str(folder))
    return folder


def _write(file: Path, head: bytes, pieces: Iterator[array[int]]) -> None:
    """Write tokens as text; the file appears complete or not at all."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as out:
            out.write(head)
            for piece in pieces:
                if sys.byteorder == "big":
                    piece.byteswap()
                out.write(" ".join(map(str, piece)).encode() + b"\n")
        unfinished.replace(file)
    except BaseException:  # also an interruption
        unfinished.unlink(missing_ok=True)
        raise
