"""Digests of tensors: what changes them, what does not, and what a rank writes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.runtime.checkpoint import digests
from ttlaunch.runtime.checkpoint.digests import ReplicaDigests, TensorDigests, as_words, digest, odd_factors


def digest_of(tensor):
    words = as_words(tensor)
    return int(digest(words, odd_factors(min(digests._BLOCK, len(words)), words.device)))


@given(st.integers(0, 999), st.integers(0, 31))
def test_any_flipped_bit_of_any_value_changes_the_digest(place, bit):
    tensor = torch.linspace(-3, 3, 1000).reshape(20, 50)
    before = digest_of(tensor)
    flip(tensor, place, bit)
    assert before != digest_of(tensor)
    flip(tensor, place, bit)
    assert before == digest_of(tensor)


@pytest.mark.parametrize("bit", range(32))
def test_the_same_bit_flipped_in_two_values_changes_the_digest(bit):
    tensor = torch.linspace(-3, 3, 1000)
    before = digest_of(tensor)
    seen = set()
    for place in range(1, 1000):
        changed = tensor.clone()
        flip(changed, 0, bit)
        flip(changed, place, bit)
        seen.add(digest_of(changed))
    assert before not in seen
    assert 999 == len(seen)


def test_two_values_that_change_places_change_the_digest():
    tensor = torch.linspace(-3, 3, 1000)
    changed = tensor.clone()
    changed[[3, 700]] = tensor[[700, 3]]
    assert digest_of(tensor) != digest_of(changed)


def test_zero_and_minus_zero_have_other_digests_and_nan_has_one():
    assert digest_of(torch.tensor([0.0])) != digest_of(torch.tensor([-0.0]))
    assert digest_of(torch.tensor([float("nan")])) == digest_of(torch.tensor([float("nan")]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensors_of_every_type_and_size_have_digests(dtype):
    for count in range(1, 6):
        tensor = torch.ones(count, dtype=dtype)
        changed = tensor.clone()
        changed[-1] = 0
        assert digest_of(tensor) != digest_of(changed)
    assert digest_of(torch.ones((), dtype=dtype)) == digest_of(torch.ones(1, dtype=dtype))
    assert 0 == digest_of(torch.ones(0, dtype=dtype))


def test_tensors_have_the_digests_together_that_each_has_by_itself(monkeypatch):
    """Those that are multiplied together, in several groups, and between them empty, large and other ones, in their order."""
    monkeypatch.setattr(digests, "_TOGETHER", 200)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(count, generator=generator) for count in (0, 1, 5000, 3, 150, 90, 0, 4096, 60, 4097, 1, 99)]
    tensors += [torch.ones(7, dtype=torch.bfloat16), torch.ones(3, dtype=torch.uint8), torch.ones(4, dtype=torch.int64)]
    tensors.insert(4, torch.randn(12, 9, generator=generator).t())
    found = [one % 2**64 for one in TensorDigests().of(tensors)]
    assert [digest_of(tensor) % 2**64 for tensor in tensors] == found
    assert len(set(found)) == len(tensors) - 1  # two are empty


def test_a_view_has_the_digest_of_its_copy():
    matrix = torch.linspace(-3, 3, 1000).reshape(20, 50)
    assert digest_of(matrix.t()) == digest_of(matrix.t().contiguous())


def test_a_flipped_bit_in_any_block_of_a_large_tensor_changes_the_digest(monkeypatch):
    monkeypatch.setattr(digests, "_BLOCK", 64)
    tensor = torch.linspace(-3, 3, 200)
    before, seen = digest_of(tensor), set()
    for place in range(200):
        changed = tensor.clone()
        flip(changed, place, 31)
        seen.add(digest_of(changed))
    assert before not in seen
    assert 200 == len(seen)


def test_a_rank_writes_names_only_when_they_change_and_each_step_once():
    written = []
    replica = ReplicaDigests(10, write=lambda **record: written.append(record))
    weights = torch.ones(3)
    replica.report(0, [("w", weights)])
    replica.report(10, [("w", weights)])
    replica.report(10, [("w", weights + 1)])
    replica.report(20, [("w", weights), ("b", weights + 1)])
    assert [(0, ["w"], 16), (10, None, 16), (20, ["w", "b"], 32)] == [
        (record["step"], record.get("names"), len(record["digests"])) for record in written
    ]
    assert written[0]["digests"] == written[1]["digests"] == written[2]["digests"][:16] != written[2]["digests"][16:]


def flip(tensor, place, bit):
    """Flip one bit of a value; bit 31 is the sign."""
    words = tensor.view(-1).view(torch.int32)
    words[place] ^= 1 << bit if bit < 31 else -(2**31)


def test_pieces_of_a_block_have_the_digest_of_the_block(monkeypatch):
    tensor = torch.linspace(-3, 3, 1001)
    whole, factors = digest_of(tensor), odd_factors(1001, tensor.device)
    monkeypatch.setattr(digests, "_PIECE", 10)

    assert whole == digest_of(tensor)
    assert torch.equal(factors, odd_factors(1001, tensor.device))
