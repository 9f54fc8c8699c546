"""The size of compressed gradients as a formula, and the rules about `compression_config`. No torch here."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from ttlaunch.diagnostics import Severity
from ttlaunch.diagnostics.count import counted
from ttlaunch.spec.recipe.declare import Layout, Problem
from ttlaunch.spec.recipe.sections import CompressionConfig
from ttlaunch.spec.recipe.traffic import NUMBER_BYTES, VALUE_BYTES, Ranks, Traffic

_KIND = "compression_config.kind"


def payload_bytes(cfg: CompressionConfig, values: int, *, sides: int = 0, factored: int = 0) -> int:
    """Return how many bytes a compressed gradient of `values` numbers takes.

    Args:
        cfg: The codec's configuration.
        values: The number of values of the gradient, padding included.
        sides: For `powersgd`, the sum of the rows and columns of all matrices that it sends as factors.
        factored: For `powersgd`, the number of values in those matrices.

    >>> payload_bytes(CompressionConfig(kind="int8"), 1000)
    1016
    """
    match cfg.kind:
        case "none":
            return VALUE_BYTES * values
        case "bf16":
            return 2 * values
        case "int8":
            return values + VALUE_BYTES * -(-values // cfg.block_size)
        case "top_k":
            return 2 * VALUE_BYTES * values_sent(cfg.k, values)
        case "powersgd":
            return VALUE_BYTES * (cfg.rank * sides + values - factored)


def values_sent(k: float, values: int) -> int:
    """Return the number of values in the share `k`, rounded up; `k` counts as the decimal number that the user wrote.

    >>> values_sent(0.29, 100), values_sent(0.07, 100)
    (29, 7)
    """
    return math.ceil(Fraction(str(k)) * values)


def compressed_mean_traffic(among: Sequence[int], cfg: CompressionConfig, ranks: Ranks) -> list[Traffic]:
    """Return the traffic of a step in which each rank sends its payload and its counts to every other rank."""
    return _to_all_others(among, cfg, ranks, name="gradients", every=1)


def compressed_averaging_traffic(config: Any, among: Sequence[int], ranks: Ranks, *, every: int) -> list[Traffic]:
    """Return the traffic of a compressed average after every `every` steps, as `LocalReplica` makes it."""
    cfg: CompressionConfig = config.compression_config
    of_gradients = every == 1 and config.training_config.optimizer == "sgd"
    return _to_all_others(among, cfg, ranks, name="gradients" if of_gradients else "differences", every=every)


def _to_all_others(
    among: Sequence[int], cfg: CompressionConfig, ranks: Ranks, *, name: str, every: int
) -> list[Traffic]:
    found = []
    for source in among:
        facts = ranks.facts[source]
        sides, factored = facts.get("factored_sides", 0), facts.get("factored_values", 0)
        size = payload_bytes(cfg, ranks.weight_bytes(source) // VALUE_BYTES, sides=sides, factored=factored)
        for dest in among:
            if dest != source:
                found.append(Traffic(name, source, dest, per_step=size, every=every))
                found.append(Traffic("counts", source, dest, per_step=2 * NUMBER_BYTES, every=every))
    return found


def compression_makes_sense(config: Any, layout: Layout) -> Iterator[Problem]:
    """Apply the rules of `compression_config` for recipes whose `worker`s send their gradients through codecs."""
    for rule in (
        _torch_compresses_nothing,
        _dropped_values_have_feedback,
        _factors_are_thin,
        _compression_saves_bytes,
    ):
        yield from rule(config, layout)


def pushes_are_compressed(config: Any, layout: Layout) -> Iterator[Problem]:
    """Apply the rules of `compression_config` for recipes whose `worker`s push their gradients to a server."""
    for rule in (_dropped_values_have_feedback, _factors_are_thin, _a_payload_is_smaller):
        yield from rule(config, layout)


def _torch_compresses_nothing(config: Any, _layout: Layout) -> Iterator[Problem]:
    """A codec cannot be combined with torch's own reduction, which sends gradients uncompressed."""
    kind = config.compression_config.kind
    reduction = config.data_parallel_config.reduction if hasattr(config, "data_parallel_config") else None
    if kind != "none" and reduction == "fast":
        yield Problem(
            "C085",
            f"`kind` is `{kind}` but `reduction: fast` sends gradients as they are",
            "compression_config.kind",
            "expected `none`",
            others=(("data_parallel_config.reduction", "torch's own"),),
            hints=("`--set data_parallel_config.reduction=canonical`",),
        )


def _dropped_values_have_feedback(config: Any, _layout: Layout) -> Iterator[Problem]:
    """Warn if a codec that drops most of a gradient has no error feedback."""
    cfg: CompressionConfig = config.compression_config
    if cfg.kind in {"top_k", "powersgd"} and not cfg.error_feedback:
        yield Problem(
            "C086",
            f"`kind` is `{cfg.kind}` without `error_feedback`: what a gradient leaves out is never sent",
            "compression_config.error_feedback",
            "off",
            others=((_KIND, "leaves most of a gradient out"),),
            hints=("`--set compression_config.error_feedback=true`",),
            severity=Severity.WARNING,
        )


def _factors_are_thin(config: Any, _layout: Layout) -> Iterator[Problem]:
    """Warn if factors are as wide as the matrices, which are then sent uncompressed."""
    cfg: CompressionConfig = config.compression_config
    width = config.transformer_config.embedding_dim
    if cfg.kind == "powersgd" and cfg.rank >= width:
        yield Problem(
            "C087",
            f"`powersgd` of rank {cfg.rank} makes no matrix smaller, so all are sent as they are",
            "compression_config.rank",
            f"expected far less than {width}",
            others=(("transformer_config.embedding_dim", "no matrix is wider on both sides"),),
            hints=("`--set compression_config.rank=4`",),
            severity=Severity.WARNING,
        )


def _a_payload_is_smaller(config: Any, _layout: Layout) -> Iterator[Problem]:
    """Warn if a payload is as large as the uncompressed gradient."""
    cfg: CompressionConfig = config.compression_config
    many = 10**9
    share = 0.0 if cfg.kind == "powersgd" else payload_bytes(cfg, many) / (VALUE_BYTES * many)
    if cfg.kind != "none" and share >= 1:
        yield Problem(
            "C087",
            f"`{cfg.kind}` makes a gradient no smaller",
            {"int8": "compression_config.block_size", "top_k": "compression_config.k"}.get(cfg.kind, _KIND),
            f"a payload is {share:.0%} of the gradient",
            others=((_KIND, "needs less than 100%"),),
            hints=("`--set compression_config.kind=none`",),
            severity=Severity.WARNING,
        )


def _compression_saves_bytes(config: Any, layout: Layout) -> Iterator[Problem]:
    """Warn if compression saves no bytes.

    Each of W workers receives W - 1 payloads; without compression it receives 2(W - 1)/W of the gradient.
    """
    cfg: CompressionConfig = config.compression_config
    workers = layout.counts(config).get("worker", 0)
    many = 10**9
    if cfg.kind in {"none", "powersgd"} or workers < 2:  # noqa: PLR2004 - the factors' size is known with the model
        return
    share = payload_bytes(cfg, many) / (VALUE_BYTES * many)
    if workers * share >= 2:  # noqa: PLR2004 - of the formula above
        yield Problem(
            "C087",
            f"`{cfg.kind}` moves no fewer bytes than `none` between {workers} workers",
            _KIND,
            f"{counted(workers - 1, 'payload')} of {share:.1%} = {(workers - 1) * share:.0%} of the gradient to each worker",
            others=(("multihost_config.num_workers", f"none: {2 * (workers - 1) / workers:.0%}"),),
            hints=("`--set compression_config.kind=none`",),
            severity=Severity.WARNING,
        )
