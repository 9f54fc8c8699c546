"""A model on several ranks, whose head does what a test says; the ranks are threads of one process, or real ones."""

from collections.abc import Callable

from ttlaunch.runtime.parallel.serving.columns import ColumnModel, columns_among, run_share
from ttlaunch.runtime.parallel.serving.stages import StagedModel, StageSizes, run_stage
from ttlaunch.runtime.serving.forward import CachedPart
from ttlaunch.runtime.serving.products import Products
from ttlaunch.runtime.serving.step_plan import StepPlan

from .served_models import VOCABULARY, random_model

SLOTS = 3
HEADER = 8 * (1 + StepPlan.most_numbers(SLOTS))
"""Bytes of the message that announces a plan."""


class InSteps:
    """A model on several ranks as the tests of one process use a part: `plans` are those that were computed."""

    def __init__(self, model):
        self.model, self.plans = model, []

    def run(self, plan, tokens):
        self.plans.append(plan)
        self.model.begin(plan, tokens)
        return self.model.finish()


def part_of(ctx, cfg, split, count):
    """What a rank has of the model: its stage, or its columns."""
    blocks = cfg.transformer_config.num_blocks
    if split == "stages":
        own = range(ctx.rank * blocks // count, (ctx.rank + 1) * blocks // count)
        ends = {"has_embedding": ctx.rank == 0, "has_head": ctx.rank == count - 1}
        model = random_model(cfg, blocks=own, **ends)
        products = Products(cfg, model)
    else:
        model = random_model(cfg)
        gather = columns_among(ctx, range(count))
        products = Products(cfg, model, place=ctx.rank, count=count, gather=gather)
    context = cfg.transformer_config.max_sequence_length
    return CachedPart(cfg, model, slots=SLOTS, context=context, products=products)


def take_part(ctx, cfg, split, count, *, head: Callable, watch: Callable = lambda plan: None):
    """Be one of `count` ranks until the head is done; returns at the head what `head(model)` returns.

    Args:
        ctx: The rank.
        cfg: The model.
        split: `stages` or `columns`.
        count: Ranks that share the model, from rank 0.
        head: What the head does with the model.
        watch: Called with each plan of this rank.
    """
    part = part_of(ctx, cfg, split, count)
    computed, context = part.run, part.cache.context
    sizes = StageSizes(SLOTS, context, cfg.transformer_config.embedding_dim, VOCABULARY)

    def run(plan, x):
        watch(plan)
        return computed(plan, x)

    part.run = run
    if ctx.rank == 0:
        if split == "stages":
            model = StagedModel(ctx, range(count), sizes, run_part=run)
        else:
            model = ColumnModel(ctx, range(count), part)
        found = head(model)
        model.end()
        return found
    if split == "stages":
        run_stage(ctx, range(count), sizes, run_part=run)
    else:
        run_share(ctx, 0, part)
    return None
