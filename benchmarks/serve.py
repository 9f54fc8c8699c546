"""How fast the serving engine is in one process, beside `transformers` with the same weights, and what exact bits cost.

    python benchmarks/serve.py [--rounds 5] [--tokens 120] [--blocks 6] [--width 256] [--vocabulary 256] [--precision fp32] [--processor-time]

A model with random weights continues prompts of 32 tokens greedily, with one thread of torch. The same weights are in a GPT2LMHeadModel, whose
`generate` (eager attention, cache of keys and values) has to give the same tokens. All ways take turns in every round; a figure is the median
over the rounds of a ratio within one. With `--processor-time`, times are those
of this process alone, for a machine that does other things too. Needs `transformers` (its version is in constraints.txt), which no extra brings.

Ends with 1 if a limit is missed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runtime.serving.served_models import configuration, random_model
from ttlaunch.running.pretrained.gpt2 import gpt2_config, gpt2_names
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.serving.ask import Ask, Limits, Sampling, Tokens
from ttlaunch.runtime.serving.engine import Engine
from ttlaunch.runtime.serving.forward import CachedPart, WholeModel
from ttlaunch.runtime.serving.products import Products
from ttlaunch.runtime.serving.rules import EXACT, FAST
from ttlaunch.runtime.serving.text import make_tokenizer

_PROMPT, _CONTEXT, _STREAMS = 32, 256, 8
_LIMITS = {
    "one stream, exact ÷ transformers": 1.0,
    "one stream, not exact ÷ transformers": 1.4,
    "8 streams ÷ one, exact": 2.5,
    "8 streams, exact ÷ not exact": 0.9,
    "one stream, exact: bytes of weights a second ÷ a sum over them": 0.2,
    "one stream, not exact: bytes of weights a second ÷ a sum over them": 0.45,
}


def main() -> int:
    """Measure in turns, and print each ratio with its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    torch.set_num_threads(1)
    cfg = configuration(length=_CONTEXT, width=options.width, blocks=options.blocks, precision=options.precision)
    model = random_model(cfg, vocabulary=options.vocabulary)
    engines = {
        (padding, streams): _engine(cfg, model, options, padding=padding, streams=streams)
        for padding in (EXACT, FAST)
        for streams in (1, _STREAMS)
    }
    prompts = _prompts(options)
    peer = _in_transformers(cfg, model, options)
    rounds = []
    for _ in range(options.rounds + 1):
        speeds = {
            name: _generate(engine, prompts[: name[1]], options.tokens, clock) for name, engine in engines.items()
        }
        theirs, their_s = _generate_there(peer, prompts[0], options.tokens, clock)
        if speeds[EXACT, 1][0][0] != theirs and options.precision == "fp32":
            raise SystemExit("transformers gives other tokens with these weights")
        rounds.append(
            ({name: speed for name, (_, speed) in speeds.items()}, options.tokens / their_s, _sum_s(model, clock))
        )
    return _report(rounds[1:], model)  # the first round warms up


def _engine(cfg: Any, model: Model, options: argparse.Namespace, *, padding: Any, streams: int) -> Engine:
    products = Products(cfg, model, padding=padding)
    part = CachedPart(cfg, model, slots=streams, context=_CONTEXT, products=products)
    tokenizer = make_tokenizer("ids", vocabulary=options.vocabulary, alphabet=())
    return Engine(WholeModel(part), tokenizer, Limits(streams, 8, _CONTEXT, guesses=False))


def _prompts(options: argparse.Namespace) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(options.vocabulary, (_STREAMS, _PROMPT), generator=generator)
    return [tuple(row) for row in drawn.tolist()]


def _generate(
    engine: Engine, prompts: list[tuple[int, ...]], count: int, clock: Callable[[], float]
) -> tuple[list[list[int]], float]:
    """Continue the prompts together; returns the tokens of each, and tokens per second."""
    begun = clock()
    for number, prompt in enumerate(prompts, start=1):
        engine.submit(Ask(stream=number, prompt=prompt, max_tokens=count, sampling=Sampling(temperature=0.0)))
    texts: list[list[int]] = [[] for _ in prompts]
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                texts[event.stream - 1] += event.ids
    return texts, len(prompts) * count / (clock() - begun)


def _in_transformers(cfg: Any, model: Model, options: argparse.Namespace) -> Any:
    """Make the model of transformers that has these weights: there, matrices are transposed and have other names."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise SystemExit("this needs `pip install transformers -c constraints.txt`") from error
    sizes = cfg.transformer_config.model_dump() | {"dropout_prob": 0.0}
    config = GPT2Config(**gpt2_config(sizes, vocabulary=options.vocabulary), attn_implementation="eager")
    peer = GPT2LMHeadModel(config).eval()
    ours = dict(model.named_parameters())
    state: dict[str, Tensor] = {}
    for name, (theirs, is_turned) in gpt2_names(options.blocks, tied=False).items():
        value = ours[name].detach()
        state[theirs] = value.T if is_turned else value
    peer.load_state_dict(state, strict=True)
    return peer.to(torch.bfloat16) if options.precision == "bf16" else peer


@torch.no_grad()
def _generate_there(
    peer: Any, prompt: tuple[int, ...], count: int, clock: Callable[[], float]
) -> tuple[list[int], float]:
    given = torch.tensor([prompt])
    begun = clock()
    found = peer.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist(), clock() - begun


def _sum_s(model: Model, clock: Callable[[], float]) -> float:
    """Seconds to read all weights once, as a sum does."""
    matrices = [value.detach() for value in model.parameters()]
    begun = clock()
    for _ in range(10):
        for matrix in matrices:
            matrix.sum()
    return (clock() - begun) / 10


def _report(rounds: list[tuple[dict[Any, float], float, float]], model: Model) -> int:
    del model
    ratios: dict[str, list[float]] = {name: [] for name in _LIMITS}
    for ours, theirs, sum_s in rounds:
        found = (
            ours[EXACT, 1] / theirs,
            ours[FAST, 1] / theirs,
            ours[EXACT, _STREAMS] / ours[EXACT, 1],
            ours[EXACT, _STREAMS] / ours[FAST, _STREAMS],
            ours[EXACT, 1] * sum_s,
            ours[FAST, 1] * sum_s,
        )
        for name, ratio in zip(_LIMITS, found, strict=True):
            ratios[name].append(ratio)
    first = statistics.median(theirs for _, theirs, _ in rounds)
    print(f"transformers, one stream: {first:.0f} tokens/s")
    is_missed = False
    for name, values in ratios.items():
        median, limit = statistics.median(values), _LIMITS[name]
        is_missed |= median < limit
        missed = "" if median >= limit else "  MISSED"
        print(f"{name:68} {median:6.2f}  {min(values):.2f} to {max(values):.2f}  (at least {limit:g}){missed}")
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
