"""Name the data that are drawn from a seed instead of read from a file. No torch, no numpy.

The name stands where the path of a text would: in the plan, and in the digest that ranks compare. What it names is drawn by
`ttlaunch/runtime/data/synthetic.py`.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from ttlaunch.spec.recipe.corpus import Corpus, check_epochs
from ttlaunch.spec.recipe.declare import Layout, Problem
from ttlaunch.spec.recipe.sections import TrainingConfig, TrainingFile

_MARK = "synthetic:"
_SOURCE = "data_config.source"
_ABOUT_FILES = (
    "data_path",
    "tokenizer_type",
    "response_template",
    "instruction_template",
    "validation_fraction",
)


def is_synthetic(cfg: TrainingFile) -> bool:
    """Return whether the data are drawn from a seed instead of read."""
    return cfg.data_config.source != "file"


def synthetic_path(cfg: TrainingFile) -> Path:
    """Return the name of drawn data, which stands where there would be a path."""
    return Path(_MARK + json.dumps(cfg.data_config.model_dump(), sort_keys=True, separators=(",", ":")))


def synthetic_corpus(path: Path | None) -> Corpus | None:
    """Return the name of drawn data as the text that ranks compare; None if the path is a real one."""
    text = str(path).encode()
    if path is None or not text.startswith(_MARK.encode()):
        return None
    return Corpus("the data of `data_config`", text, hashlib.sha256(text).hexdigest())


def check_synthetic(corpus: Corpus, cfg: TrainingFile) -> None:
    """Check that `data_config.sequences` is enough for the configured training.

    Raises:
        CorpusError: `num_epochs` passes do not fill one step.
    """
    check_epochs(corpus, cfg, cfg.data_config.sequences, kind="sequences")


def drawn_data_fit_the_training(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """If tokens are drawn, the model is one for tokens, no key for files is set, and `branching` is at most the vocabulary."""
    if not is_synthetic(config):
        return
    drawn, training = config.data_config, config.training_config
    if drawn.branching > drawn.vocabulary:
        yield Problem(
            "C067",
            f"`branching` is {drawn.branching}, but there are {drawn.vocabulary} different tokens",
            "data_config.branching",
            f"expected 1 to {drawn.vocabulary}",
            others=(("data_config.vocabulary", "of which so many may follow"),),
        )
    if training.model_type == "conv":
        yield Problem(
            "C089",
            f"`source` {drawn.source} draws tokens, and `model_type` `conv` classifies images",
            _SOURCE,
            others=(("training_config.model_type", "images"),),
            hints=("`--set training_config.model_type=gpt`", f"`--set {_SOURCE}=file`"),
        )
    for key in _ABOUT_FILES:
        if getattr(training, key) != TrainingConfig.model_fields[key].default:
            yield Problem(
                "C089",
                f"`{key}` is about a file, and `source` {drawn.source} draws the data",
                f"training_config.{key}",
                others=((_SOURCE, "no file"),),
                hints=("remove the key", f"`--set {_SOURCE}=file`"),
            )
