"""Name data that are generated from a seed instead of read from a file. No torch, no numpy.

The name takes the place of a text's path in the plan, and of its content in the digest that ranks compare.
`ttlaunch/runtime/data/synthetic.py` generates the data.
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
    """Return whether the data are generated from a seed instead of read."""
    return cfg.data_config.source != "file"


def synthetic_path(cfg: TrainingFile) -> Path:
    """Return the name of generated data, which takes the place of a path."""
    return Path(_MARK + json.dumps(cfg.data_config.model_dump(), sort_keys=True, separators=(",", ":")))


def synthetic_corpus(path: Path | None) -> Corpus | None:
    """Return the name of generated data in place of a text; None if the path is that of a file, or None."""
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


def generated_data_fit_the_training(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Generated tokens need a model for tokens, no keys for files, and a `branching` of at most the vocabulary."""
    if not is_synthetic(config):
        return
    generated, training = config.data_config, config.training_config
    if generated.branching > generated.vocabulary:
        yield Problem(
            "C067",
            f"`branching` is {generated.branching}, but there are {generated.vocabulary} different tokens",
            "data_config.branching",
            f"expected 1 to {generated.vocabulary}",
            others=(("data_config.vocabulary", "of which so many may follow"),),
        )
    if training.model_type == "conv":
        yield Problem(
            "C089",
            f"`source` {generated.source} draws tokens, and `model_type` `conv` classifies images",
            _SOURCE,
            others=(("training_config.model_type", "images"),),
            hints=("`--set training_config.model_type=gpt`", f"`--set {_SOURCE}=file`"),
        )
    for key in _ABOUT_FILES:
        if getattr(training, key) != TrainingConfig.model_fields[key].default:
            yield Problem(
                "C089",
                f"`{key}` is about a file, and `source` {generated.source} draws the data",
                f"training_config.{key}",
                others=((_SOURCE, "no file"),),
                hints=("remove the key", f"`--set {_SOURCE}=file`"),
            )
