"""C17: top-k and PowerSGD: their bounds, on hostile gradients too, and PowerSGD's warm start."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.runtime.parallel.compression.powersgd import Matrix, PowerSgd, matrices_in
from ttlaunch.runtime.parallel.compression.top_k import TopK

from .test_codecs import ANY, decoded, vectors

MODEL = [(9, 7), (9,), (2, 3, 3), (40, 30)]
STARTS = [0, 64, 80, 112]
SIZE = 112 + 1200 + 5


@given(vectors(), st.integers(1, 100))
def test_top_k_sends_the_largest_as_they_are(values_N, percent):
    values_N = values_N.float()
    found = decoded(TopK(percent / 100), values_N)
    count = -(-len(values_N) * percent // 100)
    sent = found != 0
    assert found[sent].equal(values_N[sent])
    left = values_N[~sent].double().abs()
    assert int(sent.sum()) <= count
    assert count == 0 or sorted(values_N.abs().tolist())[-count] >= (float(left.max()) if len(left) else 0)
    error, norm = float((values_N.double() - found.double()).norm()), float(values_N.double().norm())
    assert error**2 <= (1 - count / max(1, len(values_N))) * norm**2 * (1 + 1e-12) + 1e-300


@pytest.mark.parametrize(("k", "count", "sent"), [(0.01, 1000, 10), (0.07, 100, 7), (0.29, 100, 29), (0.001, 5, 1)])
def test_the_share_is_rounded_up_and_not_by_binary_fractions(k, count, sent):
    """0.29 * 100 is 28.999… and 0.07 * 100 is 7.000…1 in floating point."""
    assert 8 * sent == TopK(k).payload_bytes(count)


@given(st.lists(ANY, min_size=1, max_size=40), st.integers(1, 100))
def test_top_k_sends_what_is_not_finite_first(values, percent):
    values_N = torch.tensor(values, dtype=torch.float32)
    found = decoded(TopK(percent / 100), values_N)
    strange, shown = int((~values_N.isfinite()).sum()), int((~found.isfinite()).sum())
    assert min(strange, -(-len(values) * percent // 100)) == shown


def build(rank=2, **keys):
    return PowerSgd(SIZE, rank=rank, matrices=matrices_in(MODEL, STARTS), **keys)


def test_powersgd_sends_factors_of_matrices_and_the_rest_as_it_is():
    values_N = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    found = decoded(build(), values_N)
    small, vector, large = range(63), range(64, 112), range(112, 1312)
    assert [Matrix(0, 9, 7), Matrix(80, 2, 9), Matrix(112, 40, 30)] == matrices_in(MODEL, STARTS)
    assert 4 * (2 * (9 + 7) + 2 * (40 + 30) + SIZE - 63 - 1200) == build().payload_bytes(SIZE)
    assert found[vector.start : vector.stop].equal(values_N[vector.start : vector.stop])
    assert found[1312:].equal(values_N[1312:])
    for part in (small, large):
        assert not found[part.start : part.stop].equal(values_N[part.start : part.stop])


def test_a_codec_for_other_vectors_is_refused():
    with pytest.raises(ValueError, match=f"5 values, but this codec is for vectors of {SIZE}"):
        build().payload_bytes(5)


@given(vectors(max_size=400), st.integers(1, 3))
def test_powersgd_never_errs_by_more_than_the_values(values_N, rank):
    """The projection's bound; values of which sums overflow may show as not finite, and never as wrong ones."""
    values_N = values_N.float()
    found = decoded(PowerSgd(len(values_N), rank=rank), values_N)
    if values_N.numel() and float(values_N.abs().max()) > 1e36:
        return
    error, norm = float((values_N.double() - found.double()).norm()), float(values_N.double().norm())
    assert error <= norm * (1 + 1e-5) + 2.0**-126 * math.sqrt(len(values_N))
    assert bool((found[: len(values_N)] == 0).all()) or norm > 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_powersgd_is_exact_where_the_matrix_has_so_low_a_rank(scale):
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(side, 2, generator=generator, dtype=torch.float64) for side in (40, 30))
    values_N = (left @ right.T * scale).float().flatten()
    found = decoded(PowerSgd(1200, rank=2, matrices=[Matrix(0, 40, 30)]), values_N)
    assert float((found / scale - values_N / scale).norm() / (values_N / scale).norm()) < 1e-5


def test_the_error_of_powersgd_is_what_the_factors_lack():
    values_N = torch.randn(1200, generator=torch.Generator().manual_seed(4))
    codec = PowerSgd(1200, rank=3, matrices=[Matrix(0, 40, 30)])
    payload, found = codec.encode(values_N), torch.empty(1200)
    codec.decode(payload, found)
    right = payload.view(torch.float32)[40 * 3 :]
    expected = math.sqrt(float(values_N.double().norm() ** 2 - right.double().norm() ** 2))
    assert expected == pytest.approx(float((values_N - found).double().norm()), rel=1e-4)


def test_a_warm_start_comes_near_the_best_factors():
    """Of one matrix sent again and again: the truncated SVD is the best there is of this rank."""
    generator = torch.Generator().manual_seed(5)
    spectrum = torch.diag(torch.tensor([4.0, 3.0, 1.0, 0.5] + [0.1] * 26))
    left, right = (torch.linalg.qr(torch.randn(30, 30, generator=generator)).Q for _ in range(2))
    matrix_N = (left @ spectrum @ right).flatten()
    codec = PowerSgd(900, rank=2, matrices=[Matrix(0, 30, 30)])
    errors = [float((decoded(codec, matrix_N) - matrix_N).norm()) for _ in range(8)]
    best = math.sqrt(1 + 0.25 + 26 * 0.01)
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_matrix_that_is_not_finite_is_seen_and_forgotten(strange):
    codec, values_N = build(), torch.randn(SIZE)
    decoded(codec, values_N)
    before = {name: tensor.clone() for name, tensor in codec.state().items()}
    bad_N = values_N.clone()
    bad_N[120] = strange
    found = decoded(codec, bad_N)
    assert bool(found[112:1312].isnan().all())
    assert bool(found[:112].isfinite().all())
    assert before["factor.1"].equal(codec.state()["factor.1"])


def test_a_matrix_of_zeros_leaves_the_warm_start_alone():
    codec = build()
    before = {name: tensor.clone() for name, tensor in codec.state().items()}
    assert bool((decoded(codec, torch.zeros(SIZE)) == 0).all())
    assert all(before[name].equal(tensor) for name, tensor in codec.state().items())
