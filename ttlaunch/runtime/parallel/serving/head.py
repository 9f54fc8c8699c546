"""The head of a serving run: says what is served, answers asks with an engine, and ends when the run is ordered to."""

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from ttlaunch import contract
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.parallel.serving.tally import Tally
from ttlaunch.runtime.serving.asking import TEMPLATE, AskedEngine, AskService
from ttlaunch.runtime.serving.forward import CachedPart
from ttlaunch.runtime.serving.text import NamedTokenizer
from ttlaunch.serving import wire
from ttlaunch.spec.recipe.sections import TrainingFile

_IDLE_S = 1.0
"""How long the head sleeps while nobody asks; then a message passes through all ranks."""


class OtherRanks(Protocol):
    """The other ranks of a model, as its head sees them."""

    @property
    def tally(self) -> Tally:
        """What this rank has done, and as of the last beat every other one."""

    def beat(self) -> None:
        """Pass a message through all of them and back."""

    def end(self) -> None:
        """Let all of them return."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a serving run serves, and to how many.

    Attributes:
        model: What answers are said to come from.
        weights_sha256: Hash over all parameters.
        provenance_sha256: Hash of the provenance of the checkpoint that has them; None if it has none.
        split: What each of several ranks has.
        max_streams: Streams that are computed at once.
        max_waiting: Streams that may wait for that.
        chat_template: The template in Jinja that came with the model; None for the plain one of our own models.
        special_tokens: Texts that the template asks for by name.
    """

    model: str
    weights_sha256: str
    split: Literal["stages", "columns"]
    max_streams: int
    max_waiting: int
    provenance_sha256: str | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def describe_served(
    cfg: TrainingFile,
    ctx: RankContext,
    served: Served,
    *,
    tokenizer: NamedTokenizer,
    part: CachedPart,
    broken: Sequence[str],
) -> wire.Hello:
    """Describe what is served, for the first message to everybody who connects.

    Args:
        cfg: The configuration of the model.
        ctx: The head.
        served: What is served.
        tokenizer: The model's tokenizer.
        part: The head's part of the model.
        broken: Why logits differ from those of training; empty if their bits are equal.
    """
    return wire.Hello(
        model=served.model or "model",
        weights_sha256=served.weights_sha256,
        provenance_sha256=served.provenance_sha256,
        step=ctx.steps_done,
        recipe=served.model.partition(" ")[0] or "unknown",
        vocabulary=tokenizer.vocabulary,
        context=part.cache.context,
        split=served.split if ctx.world_size > 1 else "none",
        ranks=ctx.world_size,
        precision=cfg.training_config.precision,
        torch=torch.__version__,
        cpu=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        threads=torch.get_num_threads(),
        exact=not broken,
        why_not_exact="; ".join(broken) or None,
        tokenizer_sha256=tokenizer.sha256,
        template_sha256=hashlib.sha256((served.chat_template or TEMPLATE).encode()).hexdigest(),
        max_streams=served.max_streams,
        max_waiting=served.max_waiting,
        chat_template=served.chat_template,
        special_tokens=served.special_tokens,
    )


def answer_asks(
    ctx: RankContext,
    engine: AskedEngine,
    others: OtherRanks,
    *,
    hello: wire.Hello,
    tokenizer: NamedTokenizer,
    until_left: bool = False,
) -> None:
    """Answer asks until the run is ordered to end, then let the other ranks return.

    Args:
        ctx: The head.
        engine: Computes the answers.
        others: The other ranks of the model.
        hello: What is served.
        tokenizer: The engine's.
        until_left: Whether to end, too, when everybody who has connected has left.

    Cost: between asks, a message through all ranks each second; the engine's plans have their own.
    Order: steps of the engine follow each other; asks are taken between them.

    Raises:
        OSError: The socket cannot be made.
    """
    place = os.environ.get(contract.ENV_ANSWERS_AT)
    if place is None:
        raise ValueError("nobody can ask: `ttlaunch generate` starts this recipe with a socket")
    path = Path(place)
    path.unlink(missing_ok=True)  # that of a head that was killed
    listening, stats = wire.listen(path), others.tally.as_stats
    service = AskService(engine, listening, hello=hello, tokenizer=tokenizer, beat=others.beat, stats=stats)
    others.tally.facts_of_answers = service.facts
    exactness = "exact" if hello.exact else f"not exact ({hello.why_not_exact})"
    ctx.note(f"serves {hello.model}, step {hello.step}, {exactness}, weights {hello.weights_sha256[:12]}")
    try:
        while not (ctx.should_stop() or service.is_retired or (until_left and service.is_left)):
            with ctx.announced(
                "waiting for asks"
            ):  # a head that computes alone sends nothing, and still makes progress
                service.serve(wait_s=_IDLE_S)
    finally:
        service.close()
    others.end()
