"""A trained model that answers: the head takes asks from a socket, and computes tokens for several streams in each step.

    asks --> head -- rows --> stage -- rows --> ... --> last stage -- logits --> head --> answers
    asks --> head and shares: each computes some columns of every matrix, and gathers the others' --> answers

The engine of the head computes one row for each stream and step: the keys and values of all earlier tokens are in a cache. The
logits are nevertheless those of the training's forward pass over the whole text, bit for bit: products have as many rows as the CPU
needs for that, and attention sees as many keys as in training, with those that do not exist yet masked. So a text depends only on
weights, prompt and seed: not on who else asks at the same time, nor on the number of ranks.

    ttlaunch generate latest "def main("
    ttlaunch generate latest "def main(" --ranks 2

Shapes: in `ttlaunch.runtime.serving.forward`.
Source: G.-I. Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022, for streams that
join and leave between steps. Equal bits are this project's own: the rules are in `ttlaunch.runtime.serving.rules`.
"""

from ttlaunch.train import (
    CachedPart,
    ColumnModel,
    Engine,
    Limits,
    NamedTokenizer,
    Products,
    RankContext,
    Served,
    StagedModel,
    StageSizes,
    agree_on_padding,
    answer_asks,
    blocks_of_stages,
    build_served_model,
    cache_bytes_of_token,
    columns_among,
    describe_served,
    make_tokenizer,
    read_tokenizer,
    run_share,
    run_stage,
    why_not_exact,
)

from .recipe import Config


def head(cfg: Config, ctx: RankContext) -> None:
    """Answer asks until the run is ordered to end, with the other ranks of the model."""
    served, sharing = cfg.serve_config, (ctx.rank, *ctx.ranks("share"))
    (part, broken), slots = _part(cfg, ctx), served.max_streams
    if len(sharing) > 1:
        model = ColumnModel(ctx, sharing, part)
    else:
        model = StagedModel(ctx, (ctx.rank, *ctx.ranks("stage")), _sizes(cfg), run_part=part.run, score=part.score)
    tokenizer = _tokenizer(cfg)
    limits = Limits(slots, served.max_waiting, part.cache.context, guesses=served.guesses, idle_rows=part.idle_rows)
    what = Served(
        model=served.model,
        weights_sha256=served.weights_sha256,
        provenance_sha256=served.provenance_sha256,
        split=served.split,
        max_streams=slots,
        max_waiting=served.max_waiting,
        chat_template=served.chat_template,
        special_tokens=served.special_tokens,
    )
    hello = describe_served(cfg, ctx, what, tokenizer=tokenizer, part=part, broken=broken)
    engine = Engine(model, tokenizer, limits, token_bytes=cache_bytes_of_token(cfg))
    answer_asks(ctx, engine, model, hello=hello, tokenizer=tokenizer, until_left=served.until_left)


def stage(cfg: Config, ctx: RankContext) -> None:
    """Compute this rank's blocks of every plan; the last stage also computes logits."""
    stages = (ctx.sole("head"), *ctx.ranks("stage"))
    run_stage(ctx, stages, _sizes(cfg), run_part=_part(cfg, ctx)[0].run)


def share(cfg: Config, ctx: RankContext) -> None:
    """Compute this rank's columns of every matrix for every plan."""
    run_share(ctx, ctx.sole("head"), _part(cfg, ctx)[0])


def _part(cfg: Config, ctx: RankContext) -> tuple[CachedPart, list[str]]:
    """Build what this rank has of the model, with its cache; at the head, also why bits differ from those of training."""
    served, sharing = cfg.serve_config, (ctx.sole("head"), *ctx.ranks("share"))
    place, count = (ctx.rank, 1 + len(ctx.ranks("stage"))) if len(sharing) == 1 else (0, 1)
    column = sharing.index(ctx.rank) if len(sharing) > 1 else 0
    has_head = place == (0 if cfg.transformer_config.tie_embeddings else count - 1)
    share = {"place": column, "count": len(sharing)}
    model = build_served_model(
        cfg,
        ctx,
        vocabulary=served.vocabulary,
        blocks=blocks_of_stages(cfg, vocabulary=served.vocabulary, count=count)[place],
        has_embedding=place == 0,
        has_head=has_head,
        **share,
    )
    padding, gather = agree_on_padding(ctx, sharing, served.exact), columns_among(ctx, sharing)
    products = Products(cfg, model, gather=gather, padding=padding, training_rows=served.training_rows, **share)
    part = CachedPart(
        cfg,
        model,
        slots=served.max_streams,
        context=_context(cfg),
        products=products,
        scores_later=has_head and place < count - 1,
    )
    broken = why_not_exact(cfg, ctx, model, part=part, exact=served.exact, training_rows=served.training_rows)
    return part, broken


def _tokenizer(cfg: Config) -> NamedTokenizer:
    """Make the model's tokenizer: that of others, whose file has been checked, or one of ours."""
    served, kind = cfg.serve_config, cfg.training_config.tokenizer_type
    if served.tokenizer_file:
        file, sha256 = served.tokenizer_file, served.tokenizer_sha256
        return read_tokenizer(file, sha256=sha256, vocabulary=served.vocabulary, ends=served.ends)
    return make_tokenizer(kind, vocabulary=served.vocabulary, alphabet=served.alphabet)


def _context(cfg: Config) -> int:
    return cfg.serve_config.max_context or cfg.transformer_config.max_sequence_length


def _sizes(cfg: Config) -> StageSizes:
    served, sizes = cfg.serve_config, cfg.transformer_config
    return StageSizes(
        served.max_streams, _context(cfg), sizes.embedding_dim, served.vocabulary, is_tied=sizes.tie_embeddings
    )
