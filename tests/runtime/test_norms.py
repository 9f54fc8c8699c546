"""The squared norm of a gradient in parts: the same bits however it is cut, and close to what anybody else computes."""

import itertools
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import examples
from ttlaunch.runtime.training import norms as norms_module
from ttlaunch.runtime.training.norms import LEAF_VALUES, Part, SquaredNorms, join_sums

SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=6)


def laid_out(sizes):
    """Random values of parameters with these sizes in a flat vector, and where each of them is."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // LEAF_VALUES) * LEAF_VALUES
    flat_N = torch.zeros(end)
    generator = torch.Generator().manual_seed(sum(sizes))
    for start, size in zip(starts, sizes, strict=True):
        flat_N[start : start + size] = torch.randn(size, generator=generator) * 10 ** torch.randn(
            1, generator=generator
        )
    return flat_N, [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def whole(flat_N, places):
    norms = SquaredNorms([Part(at, 0, values) for at, values in enumerate(places)])
    return join_sums(zip(norms.nodes, norms.sums(flat_N), strict=True))


@settings(deadline=None, max_examples=examples(60))
@given(SIZES, st.data())
def test_parts_of_parameters_add_up_to_the_bits_of_whole_ones(sizes, data):
    """D24: the clipping norm must not know who owns what."""
    torch.set_num_threads(1)
    flat_N, places = laid_out(sizes)
    leaves = st.integers(0, len(flat_N) // LEAF_VALUES)
    cuts = sorted(data.draw(st.lists(leaves, max_size=4)))
    borders = [0, *(LEAF_VALUES * cut for cut in cuts), len(flat_N)]
    found = []
    for start, stop in itertools.pairwise(borders):
        own_n = flat_N[start:stop].clone()  # as on a rank that has nothing else
        parts = [
            Part(at, max(start, values.start) - values.start, range(max(start, values.start), min(stop, values.stop)))
            for at, values in enumerate(places)
        ]
        moved = [
            Part(p.parameter, p.first, range(p.values.start - start, p.values.stop - start)) for p in parts if p.values
        ]
        norms = SquaredNorms(moved)
        found += zip(norms.nodes, norms.sums(own_n), strict=True)
    found.sort(key=lambda pair: (pair[0][0], pair[0][1].start))
    assert whole(flat_N, places) == join_sums(found)


def test_the_sum_is_that_of_the_squares():
    flat_N, places = laid_out([1, 16, 17, 4000])
    expected = [flat_N[values.start : values.stop].double().square().sum().item() for values in places]
    assert expected == pytest.approx(list(whole(flat_N, places).values()), rel=1e-14)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_shows(value):
    flat_N, places = laid_out([40, 40])
    flat_N[-20] = value
    first, second = whole(flat_N, places).values()
    assert first < float("inf")
    assert not second < float("inf")


def test_a_norm_takes_little_memory_and_a_small_part_of_the_gradient_at_a_time(monkeypatch):
    """torch converts all values that it gets to float64: of the whole gradient, that was the peak of a rank's memory.

    The sums of a level are half as many as those below it: kept for all leaves at once, they were 1.25 bytes for each value.
    """
    sizes = [40_000, 1, 333, 16 * 256, 16 * 64, 5_000]
    flat_N, places = laid_out(sizes)
    at_once = whole(flat_N, places)
    monkeypatch.setattr(norms_module, "_LEAVES_AT_ONCE", 7)
    monkeypatch.setattr(norms_module, "_PIECE_LEAVES", 64)
    norms = SquaredNorms([Part(at, 0, values) for at, values in enumerate(places)])
    with Seen("vector_norm") as seen:
        sums = norms.sums(flat_N)
    assert at_once == join_sums(zip(norms.nodes, sums, strict=True))
    assert 7 * LEAF_VALUES == seen.most
    tracemalloc.start()
    norms.sums(flat_N)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(flat_N) / 2


class Seen(TorchDispatchMode):
    """Notes the most values that an operation with `name` gets at once."""

    def __init__(self, name):
        super().__init__()
        self.name, self.most = name, 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        if self.name in str(func):
            self.most = max(self.most, args[0].numel())
        return func(*args, **(kwargs or {}))
