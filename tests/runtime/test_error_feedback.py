"""C17, D8: what a codec loses of one gradient arrives with the next, and is not forgotten by a checkpoint."""

import pytest
import torch

from ttlaunch.recipe import CompressionConfig
from ttlaunch.train import build_codec

N = 700
KINDS = {"bf16": {}, "int8": {}, "top_k": {"k": 0.3}, "powersgd": {"rank": 2}}


def build(kind, **keys):
    return build_codec(CompressionConfig(kind=kind, **KINDS[kind], **keys), N)


def sent(codec, values_N):
    out_N = torch.empty(N)
    codec.decode(codec.encode(values_N), out_N)
    return out_N


def gradients(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(N, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_was_sent_differs_from_all_gradients_by_one_residual(kind):
    codec, given = build(kind), gradients(30)
    total_N = sum(sent(codec, gradient_N).double() for gradient_N in given)
    owed_N = sum(gradient_N.double() for gradient_N in given) - total_N
    assert float((owed_N - codec.state()["residual"].double()).abs().max()) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_gradient_arrives_whole_in_the_mean(kind):
    """Without feedback the same error is made every time; with it, errors stay bounded."""
    gradient_N, steps = gradients(1)[0], 400
    off = {}
    for feedback in (True, False):
        codec = build(kind, error_feedback=feedback)
        mean_N = sum(sent(codec, gradient_N).double() for _ in range(steps)) / steps
        off[feedback] = float((mean_N - gradient_N).norm() / gradient_N.norm())
    assert 10 * off[True] < off[False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_state_goes_on_to_the_same_bits(kind):
    codec, again = build(kind), build(kind)
    for gradient_N in gradients(4):
        codec.encode(gradient_N)
    again.load_state({name: tensor.clone() for name, tensor in codec.state().items()})
    fresh = build(kind)
    gradient_N = gradients(1, seed=1)[0]
    expected = codec.encode(gradient_N)
    assert expected.equal(again.encode(gradient_N))
    assert not expected.equal(fresh.encode(gradient_N))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_an_overflow_is_visible_and_leaves_no_trace(kind, strange):
    """The step is skipped by whoever sees the norm; the next one owes what it owed before."""
    codec = build(kind)
    sent(codec, gradients(1)[0])
    owed_N = codec.state()["residual"].clone()
    bad_N = gradients(1, seed=2)[0]
    bad_N[3] = strange
    assert not bool(sent(codec, bad_N).isfinite().all())
    assert owed_N.equal(codec.state()["residual"])
    assert bool(sent(codec, gradients(1, seed=3)[0]).isfinite().all())


def test_nothing_is_owed_where_nothing_is_lost():
    codec = build_codec(CompressionConfig(kind="none"), N)
    assert {} == codec.state()
