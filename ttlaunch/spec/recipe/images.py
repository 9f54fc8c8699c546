"""Read and check images to train on, which are rows of numbers. No torch, no numpy.

A row has the pixels of a square image, whole numbers from 0, and then the number of its class, separated by commas. The file
of handwritten digits in scikit-learn has this format: 1797 images of 8 × 8 pixels from 0 to 16. Like any
other text, the rows have a digest and are copied to hosts.
"""

import gzip
import hashlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from math import isqrt
from pathlib import Path

from ttlaunch.spec.recipe.corpus import Corpus, CorpusError, CorpusReason, check_epochs
from ttlaunch.spec.recipe.declare import Layout, Problem
from ttlaunch.spec.recipe.sections import TrainingConfig, TrainingFile

DIGITS = "scikit-learn:digits"
"""The `data_path` that stands for the digits of the installed scikit-learn."""

_MOST_CLASSES = 1000
_ROW = re.compile(rb"[0-9]{1,9}(?:,[0-9]{1,9})+\Z")


def has_images(cfg: TrainingFile) -> bool:
    """Return whether the model is one for images."""
    return cfg.training_config.model_type == "conv"


def read_digits() -> Corpus:
    """Return the rows of scikit-learn's digits, without importing it.

    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.

    Raises:
        CorpusError: scikit-learn is not installed, or its file of digits cannot be read.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        message = "scikit-learn, which has the handwritten digits, is not installed"
        raise CorpusError(CorpusReason.NO_PACKAGE, message, package="digits")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise CorpusError(CorpusReason.UNREADABLE, f"cannot read {path}: {error}", path=path) from error
    return Corpus("scikit-learn's digits", text, hashlib.sha256(text).hexdigest())


def count_images(corpus: Corpus, cfg: TrainingFile) -> tuple[int, int]:
    """Return how many images there are for training and for validation; the last rows are kept for validation.

    Raises:
        CorpusError: A row is not an image, or images do not have the configured size, or are too few.
    """
    rows = corpus.text.split()
    pixels = cfg.transformer_config.max_sequence_length
    for number, row in enumerate(rows):
        _check_row(row, corpus, line=number + 1, pixels=pixels)
    training = cfg.training_config
    validation = int(len(rows) * training.validation_fraction)
    if validation < training.sequences_per_micro_batch or validation == len(rows):
        share = f"validation_fraction {training.validation_fraction:g} leaves {validation} of {len(rows)} images"
        needed = training.sequences_per_micro_batch
        raise CorpusError(
            CorpusReason.TOO_SHORT, f"{corpus.name}: {share} for validation, and one micro-batch needs {needed}"
        )
    check_epochs(corpus, cfg, len(rows) - validation, kind="images")
    return len(rows) - validation, validation


def text_keys_need_text(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Refuse keys about text if the model classifies images, or if the file has token ids."""
    training = config.training_config
    if training.tokenizer_type == "ids" and training.response_template:
        yield Problem(
            "C089",
            "`response_template` is text, and a file of `tokenizer_type` `ids` has none",
            "training_config.response_template",
            others=(("training_config.tokenizer_type", "numbers"),),
            hints=("remove the key",),
        )
    yield from _tokenizers_need_ids(training)
    if training.model_type != "conv":
        return
    given = {
        "transformer_config.tie_embeddings": config.transformer_config.tie_embeddings,
        "training_config.response_template": training.response_template,
        "training_config.tokenizer_type": training.tokenizer_type != "byte",
    }
    for key, value in given.items():
        if value:
            yield Problem(
                "C089",
                f"`{key.partition('.')[2]}` is about text, and `model_type` `conv` classifies images",
                key,
                others=(("training_config.model_type", "images"),),
                hints=("remove the key", "`--set training_config.model_type=gpt`"),
            )


def _tokenizers_need_ids(training: TrainingConfig) -> Iterator[Problem]:
    decider = "training_config.tokenizer_type"
    if training.tokenizer_path is not None and training.tokenizer_type != "ids":
        message = f"`tokenizer_path` is not read, because `tokenizer_type` is `{training.tokenizer_type}`"
        hints = ("remove the key", f"`--set {decider}=ids`")
        yield Problem("C089", message, "training_config.tokenizer_path", others=((decider, "decides"),), hints=hints)
    if training.tokenizer_sha256 is not None and training.tokenizer_path is None:
        message = "`tokenizer_sha256` is that of the file of `tokenizer_path`, which is null"
        yield Problem("C089", message, "training_config.tokenizer_sha256", hints=("remove the key",))


def _check_row(row: bytes, corpus: Corpus, *, line: int, pixels: int) -> None:
    found = row.count(b",")
    if not _ROW.match(row):
        message = f"{corpus.name}: line {line} is not a row of whole numbers and commas"
        hint = "a row is the pixels of a square image, row by row, and the number of its class: `0,12,255,7,3`"
        raise CorpusError(CorpusReason.NO_IMAGE, message, hint=hint)
    if isqrt(found) ** 2 != found:
        raise CorpusError(CorpusReason.NO_IMAGE, f"{corpus.name}: line {line} has {found} pixels, which make no square")
    if found != pixels:
        size = f"{isqrt(found)} × {isqrt(found)} = {found} pixels"
        message = f"an image of {corpus.name} has {size}, and `max_sequence_length` is {pixels}"
        hint = f"`--set transformer_config.max_sequence_length={found}`"
        raise CorpusError(CorpusReason.IMAGE_SIZE, message, hint=hint)
    label = int(row[row.rindex(b",") + 1 :])
    if label >= _MOST_CLASSES:
        message = f"{corpus.name}: line {line} is of class {label}; classes are 0 to {_MOST_CLASSES - 1}"
        raise CorpusError(CorpusReason.NO_IMAGE, message)
