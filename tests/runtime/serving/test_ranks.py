"""Ranks that share a model and exchange messages have the raw logits of training, send what the formula says, and heed a cancel."""

import hashlib
from collections import Counter
from functools import partial

import pytest

from recipes.serve.recipe import Config
from recipes.serve.traffic import traffic
from ttlaunch.runtime.comm.counting import CountingCommunicator
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.serving import rules
from ttlaunch.runtime.serving.ask import Accepted, Ask, Done, Limits, Sampling
from ttlaunch.runtime.serving.engine import Engine
from ttlaunch.runtime.serving.text import make_tokenizer
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.telemetry.traffic_counter import operation as named
from ttlaunch.spec.recipe.serving import gathered_of_row
from ttlaunch.spec.recipe.traffic import Ranks

from .on_ranks import HEADER, SLOTS, InSteps, take_part
from .served_models import (
    VOCABULARY,
    cached_logits,
    configuration,
    differing,
    random_model,
    random_texts,
    training_logits,
)


class Rank:
    """A rank of an in-process world as a technique sees it."""

    def __init__(self, world, rank, *, size):
        self.rank, self.world_size, self.traffic = rank, size, TrafficCounter()
        self._comm = CountingCommunicator(world.communicator(rank), self.traffic)

    def __getattr__(self, verb):
        def call(tensor, *, operation="", **peer):
            with named(self, operation):
                return getattr(self._comm, verb)(tensor, **peer)

        return call


class Served:
    """A model on ranks of this process; `outcome` has the bytes between ranks, `facts` what each reports."""

    def __init__(self, cfg, split, ranks):
        self.facts = [{}] * ranks
        self.cfg, self.split, self.ranks = cfg, split, range(ranks)
        self.rows = Counter()  # computed by the last rank, by slot

    def run(self, head):
        world, count = InProcessWorld(["rank"] * len(self.ranks)), len(self.ranks)
        found = []

        def live(rank):
            ctx = Rank(world, rank, size=count)
            watch = self._see if rank == count - 1 else lambda plan: None
            found.append(take_part(ctx, self.cfg, self.split, count, head=head, watch=watch))
            self.facts[rank] = ctx.traffic.facts_now()

        self.outcome = world.run({rank: partial(live, rank) for rank in self.ranks})
        assert ({}, []) == (self.outcome.errors, self.outcome.findings)
        return next(one for one in found if one is not None)

    def _see(self, plan):
        self.rows.update({span.slot: span.count for span in plan.spans})


@pytest.mark.parametrize("length", [64, 128, 160, 256])
@pytest.mark.parametrize(("split", "ranks"), [("stages", 2), ("stages", 3), ("columns", 2), ("columns", 4)])
def test_raw_logits_over_ranks_are_those_of_training(split, ranks, length):
    """S1, of every position of three texts."""
    cfg = configuration(length=length, blocks=3)
    texts = random_texts(cfg)
    found = Served(cfg, split, ranks).run(lambda model: cached_logits(InSteps(model), texts, chunks=(1, 7, 13)))
    expected = training_logits(random_model(cfg), texts)
    assert 0 == differing(found, expected)
    assert len({hashlib.sha256(logits.numpy().tobytes()).hexdigest() for logits in (found, expected)}) == 1


@pytest.mark.parametrize(
    ("split", "how"),
    [
        ("stages", {}),
        ("columns", {}),
        ("columns", {"precision": "bf16"}),
        ("columns", {"model_type": "mlp"}),
        ("columns", {"model_type": "llama", "num_kv_heads": 2, "mlp_dim": 96}),
    ],
    ids=["stages", "columns", "columns bf16", "columns mlp", "columns llama"],
)
def test_what_ranks_send_is_the_formula(split, how):
    """S11: bytes between each pair of ranks, by the rows of the plans; the recipe's formula has them from what ranks report."""
    ranks, cfg = 3, configuration(length=64, blocks=3, **how)
    served, plans = Served(cfg, split, ranks), []

    def head(model):
        steps = InSteps(model)
        cached_logits(steps, random_texts(cfg))
        plans.extend(steps.plans)
        model.beat()
        return model.tally.as_stats()

    stats = served.run(head)
    assert ranks == len(stats["busy_seconds"])
    assert min(stats["busy_seconds"]) > 0
    sent = served.outcome.message_bytes
    expected, width = Counter(), cfg.transformer_config.embedding_dim
    announced, told = HEADER * (len(plans) + 2), 8 * (2 + ranks)  # a beat and the end, too
    rows, wanted = sum(plan.rows for plan in plans), sum(plan.wanted for plan in plans)
    if split == "stages":
        onward = announced + 4 * width * rows + ranks * told
        expected |= {(0, 1): onward, (1, 2): onward, (2, 0): 4 * VOCABULARY * wanted + ranks * told}
        assert expected == dict(sent)
    else:
        padded = sum(rules.EXACT.product_rows(plan.rows) for plan in plans)
        heads = sum(rules.EXACT.product_rows(plan.wanted) for plan in plans)
        value = 2 if "precision" in how else 4
        gathered = (ranks - 1) * value * (gathered_of_row(cfg) * padded + VOCABULARY * heads)
        assert gathered + (ranks - 1) * (announced + 8 * rows + told) == sum(sent.values())
    served_config = {"vocabulary": VOCABULARY, "max_streams": SLOTS, "exact": "off"}  # nothing was agreed on before
    config = Config.model_validate({**cfg.model_dump(mode="json"), "serve_config": served_config})
    roles = ["head", *["stage" if split == "stages" else "share"] * (ranks - 1)]
    formula = Counter()
    for one in traffic(config, Ranks(roles, served.facts)):
        formula[one.source, one.dest] += one.once
    assert formula == dict(sent)
    for edge in stats["sent_bytes"]:  # as of the beat, before the end
        assert 0 <= sent[edge.source, edge.target] - edge.count <= announced


@pytest.mark.parametrize(("split", "ranks"), [("stages", 3), ("columns", 2)])
def test_no_rank_computes_a_row_of_a_cancelled_stream_beyond_what_is_on_its_way(split, ranks):
    """S5: at most two steps, counted by the last rank."""
    served = Served(configuration(length=64, blocks=3), split, ranks)

    def head(model):
        tokenizer = make_tokenizer("ids", vocabulary=VOCABULARY, alphabet=())
        engine = Engine(model, tokenizer, Limits(max_streams=SLOTS, context=64, guesses=False))
        for stream in (1, 2):
            ask = Ask(stream=stream, prompt=(stream, 7), max_tokens=40, sampling=Sampling(temperature=0.0))
            assert isinstance(engine.submit(ask), Accepted)
        for _ in range(10):
            engine.step()
        before = served.rows.copy()
        engine.cancel(1)
        events = []
        while not engine.is_idle:
            events += engine.step()
        return before, [event for event in events if isinstance(event, Done)]

    before, ends = served.run(head)
    assert {1: "cancelled", 2: "length"} == {end.stream: end.reason for end in ends}
    computed = served.rows - before
    assert computed[0] <= 2  # the first stream's slot
    assert computed[1] >= 25  # of the 40 tokens, some were computed before
