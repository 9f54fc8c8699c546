"""Draws tokens from logits, with noise that depends only on (seed, choice, position).

So a stream's tokens do not depend on what runs beside it, on the step that computes them, or on guesses; whichever rank
draws, it draws the same.

Shapes: V = vocabulary.
"""

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttlaunch.runtime.serving.ask import Logprob, Sampling

_Floats = npt.NDArray[np.float64]


def draw(logits_V: Tensor, sampling: Sampling, *, position: int) -> int:
    """Draw the token at a position; of equal logits, that with the lower id comes first.

    Args:
        logits_V: Shape (V,), float32, on the CPU.
        sampling: Settings; `seed` is a number unless `temperature` is 0.
        position: The token's position in its text, from 0; the prompt counts.
    """
    if not sampling.temperature:
        return int(np.argmax(logits_V.numpy()))
    scaled = logits_V.numpy().astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k]
    if sampling.top_p < 1:
        likely = np.exp(scaled[order] - scaled[order[0]])
        before = np.cumsum(likely) - likely
        order = order[before < sampling.top_p * likely.sum()]
    noise = gumbel_noise(sampling, position=position, count=len(scaled))
    return int(order[np.argmax(scaled[order] + noise[order])])


def gumbel_noise(sampling: Sampling, *, position: int, count: int) -> _Floats:
    """Return noise for each token of the vocabulary; the largest sum of logit and noise is a draw by softmax.

    The bits come from Philox, keyed by SHA-256 of seed, choice and position.

    Source: E. J. Gumbel, "Statistical Theory of Extreme Values", 1954; C. Maddison et al., "A* Sampling", NeurIPS 2014.
    """
    name = f"ttlaunch noise {sampling.seed} {sampling.choice} {position}".encode()
    key = int.from_bytes(hashlib.sha256(name).digest()[:16], "big")
    bits = np.random.Philox(key=key).random_raw(count)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # above 0 and below 1
    noise: _Floats = -np.log(-np.log(uniform))
    return noise


def logprob_of(logits_V: Tensor, token: int, *, likeliest: int) -> Logprob:
    """Return the logarithm of a token's probability, in float64, and those of the likeliest tokens."""
    logarithms = torch.log_softmax(logits_V.double(), dim=-1).numpy()
    order = np.argsort(-logarithms, kind="stable")[:likeliest]
    return Logprob(token, float(logarithms[token]), tuple((int(one), float(logarithms[one])) for one in order))
