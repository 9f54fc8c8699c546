"""Which tokens of the text count in the loss: all, or only those of responses, as when an assistant is trained.

In a text of alternating instructions and responses, each begins with a template, such as `### Instruction:` and
`### Response:`. A response extends from its template to that of the next instruction, or to the end of the text. The model
reads everything, and is trained to write responses only.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from ttlaunch.spec.recipe.corpus import Corpus, CorpusError, CorpusReason, count_sequences, split_tokens, spread_evenly
from ttlaunch.spec.recipe.sections import TrainingConfig, TrainingFile


def response_ranges(corpus: Corpus, training: TrainingConfig) -> list[range] | None:
    """Return the tokens of all responses, in order; None if every token counts."""
    begin, end = training.response_template, training.instruction_template
    if begin is None or end is None:
        return None
    if training.tokenizer_type == "byte":
        pattern = b"%b(.*?)(?=%b|\\Z)" % (re.escape(begin.encode()), re.escape(end.encode()))
        bodies: Iterator[re.Match[bytes] | re.Match[str]] = re.finditer(pattern, corpus.text, re.DOTALL)
    else:
        text = f"{re.escape(begin)}(.*?)(?={re.escape(end)}|\\Z)"
        bodies = re.finditer(text, corpus.characters, re.DOTALL)
    return [range(*body.span(1)) for body in bodies if body.group(1)]


def check_responses(corpus: Corpus, cfg: TrainingFile) -> None:
    """If only responses count in the loss, check that the text has some.

    Raises:
        CorpusError: No token of the training text counts, or none of the sequences that a validation evaluates.
    """
    training = cfg.training_config
    ranges = response_ranges(corpus, training)
    if ranges is None:
        return
    border, _ = split_tokens(corpus, cfg)
    sequences, available = count_sequences(corpus, cfg)
    length = cfg.transformer_config.max_sequence_length
    if not _meets(ranges, range(1, sequences * length + 1)):
        where = f"the first {border} tokens of {corpus.name}, which are for training,"
        raise CorpusError(CorpusReason.NO_RESPONSE, f"{where} have no text after {training.response_template!r}")
    count = min(training.validation_sequences, available)
    firsts = [border + place * length + 1 for place in spread_evenly(count, available)]
    if not any(_meets(ranges, range(first, first + length)) for first in firsts):
        message = f"none of the {count} validation sequences of {length} tokens has text after "
        raise CorpusError(CorpusReason.NO_RESPONSE, message + repr(training.response_template))


def _meets(ranges: Sequence[range], targets: range) -> bool:
    """Return whether a token of `targets` is in one of the ranges, which are in order and disjoint."""
    index = bisect_right(ranges, targets.start, key=lambda tokens: tokens.stop - 1)
    index -= index > 0 and targets.start in ranges[index - 1]
    return index < len(ranges) and ranges[index].start < targets.stop
