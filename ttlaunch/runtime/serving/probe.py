"""Checks on this machine, at a model's own shapes, that the rules give cached rows the bits of training.

The rules are those of `rules.py` on CPUs, and on GPUs the counts of rows that `tried_rows.py` has found.

Shapes: R = rows, K = inputs, N = outputs of a layer; T = tokens of a sequence, W = width of a head.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.serving import rules
from ttlaunch.runtime.serving.forward import CachedPart
from ttlaunch.runtime.serving.products import Products, linear_layers
from ttlaunch.runtime.serving.step_plan import Span, StepPlan
from ttlaunch.spec.recipe.sections import TrainingFile

_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 17, 33, 64)
_MOST_VALUES = 2 * 10**7
"""Matrices with more values than this, counted once a shape, are probed with fewer rows."""

_LAST_BLOCK = (1, 2, 3)
_STEPS = 6
_LONGEST = 4096
"""Attention of longer sequences is not computed as a whole."""


@torch.no_grad()
def probe(cfg: TrainingFile, model: Model, products: Products) -> list[str]:
    """Find out which rules do not hold here; it takes less than two seconds with a model of up to 100 million parameters.

    Args:
        cfg: The model's configuration.
        model: The part of it that this rank has.
        products: Its linear layers as they will be computed, with the number of threads that is set now.

    Returns:
        A sentence for each finding; empty: the logits served will be those of training, bit for bit.
    """
    if products.device.type != "cpu":
        return [*_of_attention(cfg, products)]
    return [*_of_length(cfg, products), *_of_products(cfg, model, products), *_of_attention(cfg, products)]


@torch.no_grad()
def probe_whole(cfg: TrainingFile, model: Model, part: CachedPart, *, training_rows: int) -> list[str]:
    """Compare logits of a whole model by its cache with those of a micro-batch in training, on texts that are drawn.

    On CPUs, rules that were found by measurement say which kernels compute what; on a GPU nobody knows, so the claim is tried with the model itself.

    Args:
        cfg: The model's configuration.
        model: All of it.
        part: The same with its cache, which is empty and gets nonsense.
        training_rows: Tokens of a micro-batch.

    Returns:
        A sentence if they differ.

    Cost: a forward pass of one micro-batch, its logits among them, and six steps of the cache.
    """
    length, context = cfg.transformer_config.max_sequence_length, part.cache.context
    texts_BT = torch.randint(model.vocabulary, (max(1, training_rows // length), length), generator=_generator())
    model.weights_N = torch.empty(0, device=part.products.device)  # a model that is only served has no flat vector
    expected_BTV = model(texts_BT.to(part.products.device))
    done = [max(1, context // share) for share in (2, 3)][: min(len(texts_BT), part.cache.slots)]
    spans = tuple(Span(slot, 0, count, 1) for slot, count in enumerate(done))
    for step in range(_STEPS):
        tokens = [texts_BT[span.slot, span.start : span.start + span.count] for span in spans]
        found_RV = part.run(StepPlan(step, spans), torch.cat(tokens))
        ends = [span.start + span.count for span in spans]
        right = torch.stack([expected_BTV[span.slot, end - 1] for span, end in zip(spans, ends, strict=True)]).float()
        if not torch.equal(right.cpu(), found_RV):
            return [
                f"logits of {len(spans)} texts differ from those of a micro-batch in training, at {max(ends)} tokens"
            ]
        spans = tuple(Span(slot, end, 1, 1) for slot, end in enumerate(ends) if end < context)
        if not spans:
            break
    return []


def _of_length(cfg: TrainingFile, products: Products) -> Iterator[str]:
    length = cfg.transformer_config.max_sequence_length
    if length < rules.ROWS:
        yield f"sequences of {length} tokens were trained in products of fewer than {rules.ROWS} rows"
    elif products.heads and (rows := rules.last_block_rows(length)) in _LAST_BLOCK:
        yield f"at {length} tokens, training's attention ends with a block of {rows} rows, which round differently"


def _of_products(cfg: TrainingFile, model: Model, products: Products) -> Iterator[str]:
    by_shape = {_shape_of(model, name, weight): name for name, (weight, _) in linear_layers(model).items()}
    is_large = sum(rows * columns for rows, columns in by_shape) > _MOST_VALUES
    many = min(64 if is_large else 256, max(rules.ROWS, cfg.transformer_config.max_sequence_length))
    counts = (1, 8) if is_large else _ROWS
    for shape, name in by_shape.items():
        whole_NK, bias_N = (_whole(part, products.columns(name), shape[0]) for part in linear_layers(model)[name])
        assert whole_NK is not None  # noqa: S101 - a layer has a matrix
        x_RK = torch.randn(many, shape[1], generator=_generator()).to(products.device, products.format)
        bias = None if bias_N is None else bias_N.to(products.format)
        whole_RN = functional.linear(x_RK, whole_NK.to(products.format), bias)
        more_RN = functional.linear(x_RK.repeat(4, 1), whole_NK.to(products.format), bias)
        if not torch.equal(more_RN[:many], whole_RN):
            yield f"{name}: products of {many} rows differ from one of {4 * many} rows, as several texts at once are in training"
        expected_RN = torch.cat([whole_RN[:, part.start : part.stop] for part in products.columns(name)], 1)
        wrong = [rows for rows in counts if rows <= many and not _is_equal(products, name, x_RK, expected_RN[:rows])]
        if wrong:
            yield f"{name}: products of {', '.join(map(str, wrong))} rows differ from one of {many} rows"


def _shape_of(model: Model, name: str, weight: Tensor) -> tuple[int, int]:
    """The shape of a layer's whole matrix."""
    split = model.splits.get("head.output.weight" if name == "head" else f"{name}.weight")
    rows, columns = weight.shape if split is None else split.shape
    return rows, columns


def _whole(part: Tensor | None, columns: Sequence[range], outputs: int) -> Tensor | None:
    """A layer's matrix or bias; where other ranks have the other columns, with zeros in their place."""
    if part is None or len(part) == outputs:
        return part
    whole = part.new_zeros(outputs, *part.shape[1:])
    start = 0
    for each in columns:
        whole[each.start : each.stop] = part[start : start + len(each)]
        start += len(each)
    return whole


def _is_equal(products: Products, name: str, x_RK: Tensor, expected_RN: Tensor) -> bool:  # noqa: PLR0917  a private comparison
    """Whether the first rows, computed as a step computes so many, have the expected bits."""
    rows = len(expected_RN)
    padded = torch.arange(products.product_rows(rows), device=products.device).clamp_(max=rows - 1)
    return torch.equal(products.own(name, rules.padded_rows(x_RK, padded))[:rows], expected_RN)


def _of_attention(cfg: TrainingFile, products: Products) -> Iterator[str]:
    sizes = cfg.transformer_config
    length, width = sizes.max_sequence_length, sizes.embedding_dim // sizes.num_heads
    if not products.heads or length > _LONGEST:
        return
    shape = (3, 1, 1, length, width)
    q, k, v = torch.randn(shape, generator=_generator()).to(products.device, products.format)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    spans = [(0, 1), (length // 3, 1), (length // 2, 3), (length // 2, 13), (length // 4, 34), (length - 1, 1)]
    for start, count in spans:
        end = min(length, start + count)
        rows = torch.arange(start, start + rules.padded_count(end - start), device=q.device).clamp_(max=end - 1)
        keys = rules.key_count(end, length)
        bias = rules.causal_bias(rows[None], keys=keys, dtype=products.format)
        queries = rules.padded_rows(q.transpose(0, 2), rows).transpose(0, 2)
        found = rules.attend(queries, k[:, :, :keys], v[:, :, :keys], bias_B1nT=bias)[:, :, : end - start]
        if not torch.equal(found, expected[:, :, start:end]):
            yield f"attention of {end - start} rows from position {start} differs from that of {length} tokens"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
