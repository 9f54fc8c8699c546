"""Rows of many streams through a part of the model, with keys and values of earlier tokens in a cache.

A row gets the bits that `Model.forward` gives it in a sequence of the training's length: alone or beside others, as part
of a prompt or one by one, and whichever rank has which part. `rules.py` says why.

Shapes: R = rows of a step, at least 4 after padding; B = streams that attend together, n = rows of each, padded; L = blocks
here, S = slots, H = heads here, C = keys of a slot, W = width of a head; D = embedding_dim, V = vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from ttlaunch.runtime.model.llama import LlamaBlock, RotaryPositions, TokenEmbedding, gated, rotated
from ttlaunch.runtime.model.mlp import CONTEXT_TOKENS, ContextEmbedding
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.serving import rules
from ttlaunch.runtime.serving.keys import fewest_keys, right_key_counts
from ttlaunch.runtime.serving.products import Products
from ttlaunch.runtime.serving.step_plan import Copy, Span, StepPlan
from ttlaunch.spec.recipe.sections import TrainingFile

_MOST_GUESSED = 16
"""On a GPU, products have up to some hundred idle rows, and logits of all of them would take long to copy."""

_SHORT_BYTES = 1 << 16
"""Logits of guessed rows that another part sends: more of them would take longer than what guesses save."""


class KvCache:
    """Keys and values of all slots, allocated once.

    Attributes:
        keys_LSHCW: Keys, in the format of attention.
        values_LSHCW: Values.
        tokens_SC: Tokens of each slot, int64; only read by a model whose embedding looks back.
        context: Tokens that a slot can hold.
        keys: Keys of a slot: the context, and what exact attention is handed beyond it.
        right_keys: With how many keys 4 query rows have exact bits, beside those of the rule for any number of rows.
    """

    def __init__(self, cfg: TrainingFile, *, blocks: int, slots: int, context: int, products: Products) -> None:
        """Allocate zeros.

        Args:
            cfg: The width of a head and the training's length.
            blocks: Blocks of this part.
            slots: Streams at the same time.
            context: Tokens of each, at most the training's `max_sequence_length`.
            products: Which heads this rank has, and the format.

        Raises:
            ValueError: The context is longer than what the model was trained with.
        """
        sizes = cfg.transformer_config
        if not 0 < context <= sizes.max_sequence_length:
            raise ValueError(
                f"a context of {context} tokens, but the model was trained with {sizes.max_sequence_length}"
            )
        self.context, self.length = context, sizes.max_sequence_length
        heads, width = len(products.heads), sizes.embedding_dim // sizes.num_heads
        self.keys = products.padding.key_count(context, self.length)
        self.right_keys = _right_keys(cfg, products)
        shape = (blocks if heads else 0, slots, heads, self.keys, width)
        self.keys_LSHCW = torch.zeros(shape, dtype=products.format, device=products.device)
        self.values_LSHCW = torch.zeros(shape, dtype=products.format, device=products.device)
        self.tokens_SC = torch.zeros(slots, context, dtype=torch.int64, device=products.device)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self.tokens_SC)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.keys_LSHCW.nbytes

    def copy(self, copy: Copy) -> None:
        """Copy the beginning of a slot to another one."""
        for kept_LSHCW in (self.keys_LSHCW, self.values_LSHCW):
            kept_LSHCW[:, copy.target, :, : copy.count] = kept_LSHCW[:, copy.source, :, : copy.count]
        self.tokens_SC[copy.target, : copy.count] = self.tokens_SC[copy.source, : copy.count]


@dataclass(frozen=True)
class _Together:
    """Streams in adjacent slots that attend in one call.

    Attributes:
        slots: Their slots.
        keys: The number of keys that attention is handed.
        rows_Bn: The row of each query; padding repeats the last one.
        bias_B1nT: What each query must not see.
    """

    slots: slice
    keys: int
    rows_Bn: Tensor
    bias_B1nT: Tensor


class _Layout:
    """Where the rows of one step go: computed once, used by every block.

    Attributes:
        kept_N: Of each row's heads, which of all keys of a block it fills.
    """

    def __init__(self, plan: StepPlan, cache: KvCache, products: Products) -> None:
        # Few numbers each: they are found on the CPU, and moved once.
        spans, padding, dtype, device = plan.spans, products.padding, products.format, products.device
        padded_rows = products.product_rows(plan.rows)
        self.rows = plan.rows
        self.cos_RW = self.sin_RW = torch.empty(0)  # of a model without rotary positions
        self.slots_R = torch.tensor([span.slot for span in spans for _ in range(span.count)])
        positions = [place for span in spans for place in range(span.start, span.start + span.count)]
        self.positions_R = torch.tensor(positions)
        self.is_padded = padded_rows > self.rows
        self.padded_R = torch.arange(padded_rows).clamp_(max=self.rows - 1)
        first_rows = accumulate((span.count for span in spans), initial=0)
        firsts = {span.slot: first for span, first in zip(spans, first_rows, strict=False)}
        heads_H = torch.arange(len(products.heads)) * cache.keys
        of_slots_R = self.slots_R * (len(products.heads) * cache.keys) + self.positions_R
        self.kept_N = (of_slots_R[:, None] + heads_H).view(-1)
        self.wanted_R = torch.tensor(plan.wanted_rows(), dtype=torch.int64)
        # Adjacent slots with equally many rows and keys take one call; each stream's bits are those of a call of its own.
        self.groups: list[_Together] = []
        by_shape = groupby(enumerate(spans), lambda item: (item[1].slot - item[0], *_shape_of(item[1], cache, padding)))
        for (_, count, keys), members in by_shape:
            group = [span for _, span in members]
            self.groups.append(self._together(group, count, keys=keys, firsts=firsts, dtype=dtype, device=device))
        places = torch.empty(self.rows, dtype=torch.int64)
        start = 0
        for together in self.groups:  # of a repeated row, any place will do: all have equal bits
            flat = together.rows_Bn.reshape(-1).cpu()
            places[flat] = torch.arange(start, start + len(flat))
            start += len(flat)
        self.places_R = rules.padded_rows(places, self.padded_R)
        # Without padding, one row of each of adjacent streams attends where it is.
        self.is_in_place = (
            not self.is_padded and len(self.groups) == 1 and self.groups[0].rows_Bn.shape == (self.rows, 1)
        )
        self.slots_R, self.positions_R, self.padded_R = (
            index.to(device) for index in (self.slots_R, self.positions_R, self.padded_R)
        )
        self.kept_N, self.wanted_R, self.places_R = (
            index.to(device) for index in (self.kept_N, self.wanted_R, self.places_R)
        )

    def _together(
        self,
        spans: list[Span],
        count: int,
        *,
        keys: int,
        firsts: dict[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Together:
        rows_Bn = torch.tensor(
            [[firsts[span.slot] + min(row, span.count - 1) for row in range(count)] for span in spans]
        )
        bias = rules.causal_bias(self.positions_R[rows_Bn].to(device), keys=keys, dtype=dtype)
        return _Together(slice(spans[0].slot, spans[-1].slot + 1), keys, rows_Bn.to(device), bias)


def _shape_of(span: Span, cache: KvCache, padding: rules.Padding) -> tuple[int, int]:
    """The padded rows of a stream, and the keys that they are handed."""
    rows, end = padding.query_rows(span.count), span.start + span.count
    keys = min(cache.keys, padding.key_count(end, cache.length))
    return rows, fewest_keys(end, cache.right_keys, otherwise=keys) if rows == rules.QUERY_ROWS else keys


def _right_keys(cfg: TrainingFile, products: Products) -> list[int]:
    """Try with how many keys attention has the bits of training; without exact bits, nothing needs to be tried."""
    sizes = cfg.transformer_config
    if not (products.heads and products.padding.is_exact):
        return []
    width, is_shared = sizes.embedding_dim // sizes.num_heads, cfg.training_config.model_type == "llama"
    is_shared &= sizes.kv_heads < sizes.num_heads
    length, device = sizes.max_sequence_length, products.device
    return right_key_counts(length, width=width, dtype=products.format, is_shared=is_shared, device=device)


def _norm_of(module: nn.LayerNorm | nn.RMSNorm) -> Callable[[Tensor], Tensor]:
    """The function of a norm, without the time that calling a module takes."""
    shape, weight, eps = list(module.normalized_shape), module.weight, module.eps
    if isinstance(module, nn.RMSNorm):
        return lambda x_RD: torch.rms_norm(x_RD, shape, weight, eps)
    bias, layer_eps = module.bias, module.eps
    return lambda x_RD: torch.layer_norm(x_RD, shape, weight, bias, layer_eps)


class CachedPart:
    """A part of a model with its cache: embedding, blocks and head, or those of them that this rank has.

    Attributes:
        cache: Keys and values of this part.
        products: Its linear layers.
        scores_later: Whether `run` ends before the head, because blocks of other parts come between.
    """

    def __init__(
        self,
        cfg: TrainingFile,
        model: Model,
        *,
        slots: int,
        context: int,
        products: Products | None = None,
        scores_later: bool = False,
    ) -> None:
        """Allocate the cache.

        Args:
            cfg: The model's configuration.
            model: The part, with its weights; they must not change while this object is in use.
            slots: Streams at the same time.
            context: Tokens of each.
            products: Its linear layers; None: all columns, in this process.
            scores_later: Whether `run` ends before the head.

        Raises:
            ValueError: The model has no tokens (`conv`), or its precision or this context is not served.
        """
        if cfg.training_config.model_type == "conv":
            raise ValueError("a model of images generates no text")
        self._model, self.scores_later = model, scores_later
        norms = (nn.LayerNorm, nn.RMSNorm)
        self._norms = {module: _norm_of(module) for module in model.modules() if isinstance(module, norms)}
        self._positions = RotaryPositions(cfg.transformer_config)
        self._is_llama = cfg.training_config.model_type == "llama"
        self.products = products or Products(cfg, model)
        self.cache = KvCache(cfg, blocks=len(model.blocks), slots=slots, context=context, products=self.products)

    @property
    def has_embedding(self) -> bool:
        """Whether the part begins with tokens."""
        return self._model.embedding is not None

    @property
    def has_head(self) -> bool:
        """Whether the part ends with logits."""
        return self._model.head is not None

    @property
    def idle_rows(self) -> int:
        """Up to how many rows of a step guesses may fill: as many as are computed in any case, and 4 at least.

        More rows take a little more time, which the guesses that are right save several times. Where another part sends logits
        of each row, there are no more of them than fit into a short message.
        """
        rows = min(_MOST_GUESSED, max(rules.QUERY_ROWS, self.products.product_rows(1)))
        return rows if self.has_head else max(1, min(rows, _SHORT_BYTES // (4 * self._model.vocabulary)))

    @torch.no_grad()
    def run(self, plan: StepPlan, x: Tensor) -> Tensor:
        """Execute a plan on this part; plans come in the order of their steps.

        Args:
            plan: Rows of streams.
            x: Where the part has the embedding, tokens, shape (plan.rows,), int64, below the vocabulary; otherwise what
                the part before returned.

        Returns:
            In the CPU's memory: where the part ends with the head, logits, shape (plan.wanted, V), float32; otherwise rows,
            shape (plan.rows, D), float32.

        Cost: without shares no message; with shares each block gathers four times, 7 D values a row of a gpt, and the head
            once.
        """
        for copy in plan.copies:
            self.cache.copy(copy)
        layout, x = _Layout(plan, self.cache, self.products), x.to(self.products.device)
        if self._is_llama:
            self._turn_rows(layout)
        if self.has_embedding:
            self.cache.tokens_SC[layout.slots_R, layout.positions_R] = x
        padded_RD = rules.padded_rows(x, layout.padded_R) if layout.is_padded else x
        if self._model.embedding is not None:
            padded_RD = self._embed(self._model.embedding, padded_RD, layout).float()
        for place, (index, block) in enumerate(self._model.blocks.items()):
            padded_RD = self._run_block(block, padded_RD, name=f"blocks.{index}", place=place, layout=layout)
        if self._model.head is None or self.scores_later:
            return padded_RD[: layout.rows].cpu()
        return self.score(rules.padded_rows(padded_RD, layout.wanted_R))

    @torch.no_grad()
    def score(self, rows_LD: Tensor) -> Tensor:
        """Return the logits of rows that have passed all blocks, shape (L, V), float32, in the CPU's memory; this part has the head."""
        wanted, device = len(rows_LD), self.products.device
        if self._model.head is None:
            raise ValueError("this part of the model has no head")
        if not wanted:
            return torch.empty(0, self._model.vocabulary)
        padded_R = torch.arange(self.products.product_rows(wanted), device=device).clamp_(max=wanted - 1)
        last_RD = self._norms[self._model.head.norm](rules.padded_rows(rows_LD.to(device), padded_R))
        return self.products.whole("head", last_RD)[:wanted].float().cpu()

    def _embed(self, embedding: Any, tokens_R: Tensor, layout: _Layout) -> Tensor:
        if isinstance(embedding, TokenEmbedding):
            tokens_RD: Tensor = embedding.token(tokens_R)
            return tokens_RD
        positions_R = rules.padded_rows(layout.positions_R, layout.padded_R)
        if not isinstance(embedding, ContextEmbedding):
            rows_RD: Tensor = embedding.token(tokens_R) + embedding.position(positions_R)
            return rows_RD
        slots_R = rules.padded_rows(layout.slots_R, layout.padded_R)
        seen_RC = positions_R[:, None] + torch.arange(1 - CONTEXT_TOKENS, 1, device=self.products.device)
        vectors_RCD = embedding.token(self.cache.tokens_SC[slots_R[:, None], seen_RC.clamp(min=0)])
        vectors_RCD[seen_RC < 0] = 0
        return self.products.whole("embedding.context", vectors_RCD.transpose(1, 2).reshape(len(tokens_R), -1))

    def _run_block(self, block: Any, x_RD: Tensor, *, name: str, place: int, layout: _Layout) -> Tensor:
        """Compute the blocks of this part for each row, with the bits of their `forward`."""
        products = self.products
        if isinstance(block, LlamaBlock):
            return self._run_llama_block(block, x_RD, name=name, place=place, layout=layout)
        if products.heads:
            projected_RN = products.own(f"{name}.attention_in", self._norms[block.attention_norm](x_RD))
            q_k_v = projected_RN.view(len(projected_RN), 3, len(products.heads), -1).unbind(1)
            mixed_RD = self._attend(*q_k_v, place=place, layout=layout)
            x_RD = x_RD + products.whole(f"{name}.attention_out", products.gathered_heads(mixed_RD))
        inner = block.activation(products.own(f"{name}.feed_forward_in", self._norms[block.feed_forward_norm](x_RD)))
        hidden = products.gathered_as(f"{name}.feed_forward_in", inner)
        return x_RD + products.whole(f"{name}.feed_forward_out", hidden)

    def _run_llama_block(self, block: LlamaBlock, x_RD: Tensor, *, name: str, place: int, layout: _Layout) -> Tensor:
        """Run one block of a llama on the rows; each rank attends with all heads, because shares keep all keys and values."""
        products = self.products
        projected_RN = products.whole(f"{name}.attention_in", self._norms[block.attention_norm](x_RD))
        q_RHW, k_RHW, v_RHW = block.split_heads(projected_RN)
        q_RHW, k_RHW = (rotated(part, layout.cos_RW, layout.sin_RW) for part in (q_RHW, k_RHW))
        mixed_RD = self._attend(q_RHW, k_RHW, v_RHW, place=place, layout=layout)
        x_RD = x_RD + products.whole(f"{name}.attention_out", mixed_RD)
        inner = gated(products.own(f"{name}.feed_forward_in", self._norms[block.feed_forward_norm](x_RD)))
        hidden = products.gathered_as(f"{name}.feed_forward_in", inner)
        return x_RD + products.whole(f"{name}.feed_forward_out", hidden)

    def _turn_rows(self, layout: _Layout) -> None:
        """Look up how far the position of each row turns its queries and keys."""
        tables = self._positions.of_length(self.cache.length, device=self.products.device)
        positions_R = rules.padded_rows(layout.positions_R, layout.padded_R)
        layout.cos_RW, layout.sin_RW = (table[positions_R] for table in tables)

    def _attend(self, q_RHW: Tensor, k_RHW: Tensor, v_RHW: Tensor, *, place: int, layout: _Layout) -> Tensor:
        """Keep the rows' keys and values, and mix for each row the values that it sees, shape (R, H W)."""
        cache = self.cache
        keys_SHCW, values_SHCW = cache.keys_LSHCW[place], cache.values_LSHCW[place]
        for kept_SHCW, new_RHW in ((keys_SHCW, k_RHW), (values_SHCW, v_RHW)):  # one call, however many texts
            width = kept_SHCW.shape[-1]
            kept_SHCW.view(-1, width).index_copy_(0, layout.kept_N, new_RHW[: layout.rows].reshape(-1, width))
        if layout.is_in_place:
            group = layout.groups[0]
            seen = (keys_SHCW[group.slots, :, : group.keys], values_SHCW[group.slots, :, : group.keys])
            return rules.attend(q_RHW[:, :, None], *seen, bias_B1nT=group.bias_B1nT).reshape(layout.rows, -1)
        mixed = []
        for group in layout.groups:
            q_BHnW = rules.padded_rows(q_RHW, group.rows_Bn).transpose(1, 2)
            seen = (keys_SHCW[group.slots, :, : group.keys], values_SHCW[group.slots, :, : group.keys])
            out_BHnW = rules.attend(q_BHnW, *seen, bias_B1nT=group.bias_B1nT)
            mixed.append(out_BHnW.transpose(1, 2).reshape(group.rows_Bn.numel(), -1))
        return rules.padded_rows(mixed[0] if len(mixed) == 1 else torch.cat(mixed), layout.places_R)


class WholeModel:
    """A model in this process, as the engine drives it (`Parts`).

    Attributes:
        depth: 1: a plan is computed when it is begun.
        part: The model with its cache.
    """

    depth = 1

    def __init__(self, part: CachedPart) -> None:
        """Take a part that has both embedding and head.

        Raises:
            ValueError: It lacks one of them.
        """
        if not (part.has_embedding and part.has_head):
            raise ValueError("a whole model has embedding and head")
        self.part = part
        self._logits: list[Tensor] = []

    def begin(self, plan: StepPlan, tokens_R: Tensor) -> None:
        """Compute a plan."""
        self._logits.append(self.part.run(plan, tokens_R))

    def finish(self) -> Tensor:
        """Return the logits of the oldest plan that was begun."""
        return self._logits.pop(0)
