"""Find, read and check the data that a configuration asks for. No torch, no numpy.

The launcher calls these functions before anything starts; ranks read the same data again and compare digests.
"""

import os
from pathlib import Path

from ttlaunch.spec.recipe.corpus import Corpus, count_sequences, read_corpus
from ttlaunch.spec.recipe.images import DIGITS, count_images, has_images, read_digits
from ttlaunch.spec.recipe.responses import check_responses
from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.recipe.synthetic import check_synthetic, is_synthetic, synthetic_corpus, synthetic_path


def given_path(cfg: TrainingFile) -> str | None:
    """Return the path that the configuration names; None if it names none, or if the data are generated."""
    return None if is_synthetic(cfg) else cfg.training_config.data_path


def default_path(cfg: TrainingFile) -> Path | None:
    """Return the path of the data without a `data_path`: generated data, the digits, or None for the default text."""
    if is_synthetic(cfg):
        return synthetic_path(cfg)
    return Path(DIGITS) if has_images(cfg) else None


def read_data(path: Path | None) -> Corpus:
    """Read a text or rows of images, or return the name of generated data; see `read_corpus`.

    Raises:
        CorpusError: The file is missing, unreadable, empty or not text.
    """
    generated = synthetic_corpus(path)
    if generated is not None:
        return generated
    return read_digits() if path is not None and os.fspath(path) == DIGITS else read_corpus(path)


def check_data(corpus: Corpus, cfg: TrainingFile) -> None:
    """Check that the data are enough for the configured training, and of the kind that its model reads.

    Raises:
        CorpusError: The data are too few, or of another kind.
    """
    if is_synthetic(cfg):
        check_synthetic(corpus, cfg)
    elif has_images(cfg):
        count_images(corpus, cfg)
    else:
        count_sequences(corpus, cfg)
        check_responses(corpus, cfg)
