"""Small models with random weights, and their cached passes beside the forward pass of training."""

import random

import pytest
import torch

from ttlaunch.recipe import TrainingFile
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.serving import rules
from ttlaunch.runtime.serving.forward import CachedPart
from ttlaunch.runtime.serving.products import Products
from ttlaunch.runtime.serving.step_plan import Span, StepPlan

needs_avx512 = pytest.mark.skipif(
    rules.ROWS < 16,
    reason="what is summed in which parts was found on CPUs with AVX-512, and other CPUs divide sums otherwise",
)
"""For tests that state which products or keys have other bits; that served bits are right is tested everywhere."""

VOCABULARY = 96


def configuration(
    *,
    length=160,
    width=64,
    blocks=2,
    heads=4,
    model_type="gpt",
    precision="fp32",
    tied=False,
    activation="gelu",
    **others,
):
    sizes = {
        "embedding_dim": width,
        "num_heads": heads,
        "num_blocks": blocks,
        "max_sequence_length": length,
        "tie_embeddings": tied,
        "activation": activation,
        **others,
    }
    training = {"model_type": model_type, "precision": precision}
    return TrainingFile.model_validate({"transformer_config": sizes, "training_config": training})


def random_model(cfg, *, vocabulary=VOCABULARY, blocks=None, has_embedding=True, has_head=True):
    """A model, or a part of it, whose biases and norms are not the zeros and ones of a new one; a part has the whole's values."""
    every = range(cfg.transformer_config.num_blocks)
    whole = Model(cfg, vocabulary=vocabulary, blocks=every, has_embedding=True, has_head=True)
    generator = torch.Generator().manual_seed(1)
    values = {
        name: parameter.detach() + torch.randn(parameter.shape, generator=generator) * 0.05
        for name, parameter in whole.named_parameters()
    }
    chosen = every if blocks is None else blocks
    model = Model(cfg, vocabulary=vocabulary, blocks=chosen, has_embedding=has_embedding, has_head=has_head)
    model.flatten(torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[name])
    return model


def random_texts(cfg, *, count=3, vocabulary=VOCABULARY):
    rng = random.Random(5)  # noqa: S311  texts, no secrets
    return [
        [rng.randrange(vocabulary) for _ in range(cfg.transformer_config.max_sequence_length)] for _ in range(count)
    ]


@torch.no_grad()
def training_logits(model, texts):
    """Logits of every position as training computes them: one micro-batch of whole sequences."""
    return model(torch.tensor(texts)).float()


class Stages:
    """Parts of a model that hand rows on, as stages on several ranks do."""

    def __init__(self, parts):
        self.parts = parts

    def run(self, plan, x):
        for part in self.parts:
            x = part.run(StepPlan.from_tensor(plan.to_tensor(), slots=part.cache.slots, context=part.cache.context), x)
        return self.parts[0].score(x[plan.wanted_rows()]) if self.parts[0].scores_later else x


def whole_part(cfg, model, *, slots=4, context=None, products=None, scores_later=False):
    context = context or cfg.transformer_config.max_sequence_length
    return CachedPart(cfg, model, slots=slots, context=context, products=products, scores_later=scores_later)


class SharesInTurns(Products):
    """All column shares of a model in this process: each computes its columns, which are then put together."""

    def __init__(self, cfg, model, *, count):
        super().__init__(cfg, model)
        self._of_few_rows = {}  # shares have none
        self._shares = [
            Products(cfg, model, place=place, count=count, gather=lambda own, _widths: own) for place in range(count)
        ]

    def own(self, name, rows_RK):
        found = [share.own(name, rows_RK) for share in self._shares]
        matrices = len(self._shares[0].columns(name))
        by_matrix = [part.chunk(matrices, 1) for part in found]
        return torch.cat([part[matrix] for matrix in range(matrices) for part in by_matrix], 1)


def cached_logits(part, texts, *, chunks=(1,), starts=(1, 5, 40), seed=7):
    """Logits of every position by cached passes, with prompts and single tokens of several streams in each step.

    Args:
        part: What executes the plans.
        texts: Tokens of each stream, which has the slot of its place.
        chunks: Possible numbers of rows of a stream in a step.
        starts: Length of the first chunk of each stream.
        seed: Decides which streams take part in which step.
    """
    rng, length = random.Random(seed), len(texts[0])  # noqa: S311  an order, no secret
    found, done, step = [[None] * length for _ in texts], [0] * len(texts), 0
    while min(done) < length:
        spans, tokens = [], []
        for slot, text in enumerate(texts):
            if done[slot] == length or rng.random() < 0.3:
                continue
            wished = starts[slot] if not done[slot] else rng.choice(chunks)
            count = min(wished, length - done[slot])
            spans.append(Span(slot, done[slot], count, count))
            tokens += text[done[slot] : done[slot] + count]
        if not spans:
            continue
        logits = iter(part.run(StepPlan(step, tuple(spans)), torch.tensor(tokens)))
        step += 1
        for span in spans:
            for position in range(span.start, span.start + span.count):
                found[span.slot][position] = next(logits)
            done[span.slot] += span.count
    return torch.stack([torch.stack(rows) for rows in found])


def differing(found_BTV, expected_BTV):
    """The number of positions whose logits differ in at least one bit."""
    assert found_BTV.shape == expected_BTV.shape
    return int((found_BTV != expected_BTV).any(dim=-1).sum())
