"""Statistics and differences of stored values are those that torch computes from the same tensors."""

import math

import pytest

from ttlaunch.running.checkpoints import tensor_values
from ttlaunch.running.checkpoints.tensor_file import read_header
from ttlaunch.running.checkpoints.tensor_values import find_difference, have_same_bytes, is_readable, measure

torch = pytest.importorskip("torch")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def stored(tmp_path):
    """`stored(tensor)`: the tensor as a file has it."""
    from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

    numbers = iter(range(100))

    def store(tensor):
        path = tmp_path / f"{next(numbers)}.safetensors"
        save_file({"a": tensor}, path)
        return read_header(path)["a"]

    return store


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _in_small_pieces(monkeypatch):
    monkeypatch.setattr(tensor_values, "_PIECE_VALUES", 7)


@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_are_those_of_torch(stored, dtype):
    tensor = drawn(5, 9, dtype=dtype)
    found, exact = measure(stored(tensor)), tensor.double()
    assert (exact.min().item(), exact.max().item(), 0, 0) == (found.least, found.largest, found.nan, found.infinite)
    assert found.norm == pytest.approx(exact.norm().item(), rel=1e-12)
    assert found.mean == pytest.approx(exact.mean().item(), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_integers_are_measured_too(stored, dtype):
    tensor = torch.arange(40).sub(20).abs().to(dtype)
    found = measure(stored(tensor))
    assert (tensor.long().min(), tensor.long().max()) == (found.least, found.largest)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_counted_and_left_out(stored, dtype):
    tensor = drawn(30, dtype=dtype)
    tensor[3], tensor[8], tensor[29] = math.nan, math.inf, -math.inf
    found = measure(stored(tensor))
    assert (1, 2) == (found.nan, found.infinite)
    assert tensor[tensor.isfinite()].double().max().item() == found.largest
    nothing = measure(stored(torch.full((9,), math.nan, dtype=dtype)))
    assert 9 == nothing.nan
    assert nothing.least is nothing.mean is None


def test_a_sum_that_overflows_is_no_error(stored):
    found = measure(stored(torch.full((9,), 1e308, dtype=torch.float64)))
    assert (0, 0, 1e308) == (found.nan, found.infinite, found.largest)


def test_a_tensor_without_values_is_measured_and_equal(stored):
    empty = stored(torch.zeros(0, 3))
    assert measure(empty).mean is None
    assert find_difference(empty, empty) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_differences_are_those_of_torch(stored, dtype):
    one = drawn(4, 3, 5, dtype=dtype)
    other = one.clone()
    assert find_difference(stored(one), stored(other)) is None
    other[1, 2, 3] += 1
    other[3, 0, 0] *= 2
    found = find_difference(stored(one), stored(other))
    apart = (one.double() - other.double()).abs()
    relative = apart / torch.maximum(one.double().abs(), other.double().abs())
    assert (2, (1, 2, 3)) == (found.values, found.first)
    assert (one[1, 2, 3].item(), other[1, 2, 3].item()) == (found.left, found.right)
    assert (apart.max().item(), relative.max().item()) == (found.largest, found.relative)


def test_zeros_of_other_signs_differ_in_bits_by_nothing(stored):
    found = find_difference(stored(torch.zeros(9)), stored(-torch.zeros(9)))
    assert (9, 0.0, 0.0) == (found.values, found.largest, found.relative)


def test_a_nan_is_like_a_nan_and_infinitely_far_from_a_number(stored):
    nan = stored(torch.full((2,), math.nan))
    assert find_difference(nan, nan) is None
    assert find_difference(nan, stored(torch.full((2,), math.nan, dtype=torch.float64))) is None
    assert math.inf == find_difference(nan, stored(torch.zeros(2))).largest


def test_values_of_two_types_are_compared_as_numbers(stored):
    exact = drawn(20, dtype=torch.bfloat16)
    assert find_difference(stored(exact), stored(exact.float())) is None
    rounded = find_difference(stored(drawn(20)), stored(drawn(20).bfloat16()))
    assert 0 < rounded.relative <= 2**-8


def test_small_floats_are_compared_by_their_bytes(stored):
    small = drawn(40).to(torch.float8_e4m3fn)
    other = small.clone()
    other[33] = 7
    assert not is_readable(stored(small).dtype)
    assert have_same_bytes(stored(small), stored(small.clone()))
    assert not have_same_bytes(stored(small), stored(other))
