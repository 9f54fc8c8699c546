"""How many bytes the ranks of a serving run send each other. No torch here: the launcher reads it.

Plans are made as clients ask, so each rank reports how many it has computed, and how many rows they had.
"""

from ttlaunch.recipe import NUMBER_BYTES, VALUE_BYTES, Ranks, Traffic, TrainingFile, header_numbers, told_numbers

_PREFILL_ROWS = 64
"""The most rows of prompts in a plan; one plan may be under way when a run fails."""


def traffic(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """Plans and rows from the head through all stages, and logits back; or plans to all shares, and columns among all ranks."""
    return _by_columns(config, ranks) if ranks.of("share") else _by_stages(config, ranks)


def _by_stages(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    served, sizes = config.serve_config, config.transformer_config
    chain = ranks.of("head", "stage")
    if len(chain) == 1:
        return []
    head, last = chain[0], chain[-1]
    row, logits = VALUE_BYTES * sizes.embedding_dim, VALUE_BYTES * served.vocabulary
    answer = row if sizes.tie_embeddings else logits
    most = _PREFILL_ROWS + served.max_streams
    found = _checks(config, ranks)
    for source, dest in zip(chain, (*chain[1:], head), strict=True):
        beats = ranks.fact(source, "beats")
        found.append(Traffic("tallies", source, dest, once=_tallies(ranks) * len(chain) * beats))
        if source == last:
            found.append(Traffic("logits", last, head, once=answer * ranks.fact(last, "wanted"), late=answer * most))
        else:
            found.append(_headers(config, ranks, (source, dest)))
            found.append(Traffic("rows", source, dest, once=row * ranks.fact(source, "rows"), late=row * most))
    return found


def _by_columns(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    served, precision = config.serve_config, config.training_config.precision
    head, sharing = ranks.sole("head"), ranks.of("head", "share")
    value = VALUE_BYTES if precision == "fp32" else 2
    most = _PREFILL_ROWS + served.max_streams
    found = _checks(config, ranks)
    for other in sharing[1:]:
        found.append(_headers(config, ranks, (head, other)))
        tokens = NUMBER_BYTES * ranks.fact(head, "rows")
        found.append(Traffic("tokens", head, other, once=tokens, late=NUMBER_BYTES * most))
        found.append(Traffic("tallies", other, head, once=_tallies(ranks) * ranks.fact(other, "beats")))
        if served.exact != "off":  # they agree on how many rows a product has
            pair = ((head, other), (other, head))
            found += [Traffic("agree_on_padding", *one, once=NUMBER_BYTES) for one in pair]
    for source in sharing:
        of_row, of_logits = (value * ranks.facts[source].get(f"{name}_values", 0) for name in ("row", "logits"))
        size = of_row * ranks.fact(source, "padded_rows") + of_logits * ranks.fact(source, "padded_wanted")
        late = (of_row + of_logits) * most
        found += [Traffic("columns", source, dest, once=size, late=late) for dest in sharing if dest != source]
    return found


def _headers(config: TrainingFile, ranks: Ranks, pair: tuple[int, int]) -> Traffic:
    each = NUMBER_BYTES * header_numbers(config.serve_config.max_streams)
    count = sum(ranks.fact(pair[0], name) for name in ("plans", "beats", "ends"))
    return Traffic("headers", *pair, once=each * count, late=each)


def _tallies(ranks: Ranks) -> int:
    """The bytes of one rank's numbers in a beat."""
    return NUMBER_BYTES * told_numbers(len(ranks.roles))


def _checks(config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """Each rank tells the head how many rules of exact bits do not hold for its part."""
    if config.serve_config.exact == "off":
        return []
    head = ranks.sole("head")
    return [Traffic("why_not_exact", one, head, once=NUMBER_BYTES) for one in ranks.of("stage", "share")]
