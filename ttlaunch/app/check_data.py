"""Read the training data that a configuration names, before anything starts."""

import os
from pathlib import Path
from typing import Any

from ttlaunch.app.run_spec import path_in
from ttlaunch.diagnostics import Diagnostic, Label, shown

_CORPUS_CODES = {
    "missing": ("C021", "training_config.data_path"),
    "empty": ("C022", "training_config.data_path"),
    "binary": ("C023", "training_config.data_path"),
    "too_short": ("C024", "training_config.data_path"),
    "unreadable": ("C025", "training_config.data_path"),
    "no_response": ("C031", "training_config.response_template"),
    "no_package": ("C088", "training_config.model_type"),
    "no_image": ("C089", "training_config.data_path"),
    "no_tokens": ("C089", "training_config.data_path"),
    "image_size": ("C089", "transformer_config.max_sequence_length"),
}
_LONGEST_MESSAGE = 500


def check_data(loaded: Any, working_folder: Path) -> tuple[dict[str, Any] | None, Diagnostic | None]:
    """Read the training data, so that a missing, empty, binary or short file is reported before anything starts.

    Returns:
        The data's path, SHA-256 and size, or None; and the mistake, or None.
    """
    from ttlaunch.app.tokenized_data import is_text_for_a_tokenizer, tokenize_corpus
    from ttlaunch.contract import referred_variable
    from ttlaunch.spec.recipe.corpus import CorpusError
    from ttlaunch.spec.recipe.data import check_data as check_content
    from ttlaunch.spec.recipe.data import default_path, given_path, read_data
    from ttlaunch.spec.recipe.images import DIGITS
    from ttlaunch.spec.recipe.synthetic import is_synthetic

    given = given_path(loaded.config)
    variable = referred_variable(given or "")
    given = os.environ.get(variable, given) if variable else given
    path = default_path(loaded.config) if given is None else Path(given)
    if path is not None and given not in {None, DIGITS}:
        path = path_in(given, working_folder)
    try:
        corpus = read_data(path)
        if not is_synthetic(loaded.config) and is_text_for_a_tokenizer(loaded.config, corpus):
            path = tokenize_corpus(loaded, corpus, working_folder)
            corpus = read_data(path)
        check_content(corpus, loaded.config)
    except CorpusError as error:
        code, key = _CORPUS_CODES[str(error.reason)]
        span = loaded.span(key)
        message = shown(error, longest=_LONGEST_MESSAGE)
        hints = (error.hint,) if error.hint else ()
        return None, Diagnostic(code, message, Label(span) if span else None, hints=hints)
    size = len(corpus.text)
    return {"path": os.fspath(path) if path else None, "sha256": corpus.sha256, "bytes": size}, None
