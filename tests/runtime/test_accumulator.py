"""The accumulator of gradients that come when they like (C1-C4): keys never collide, nothing counts twice, nothing stays."""

import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.runtime.parallel.zero import accumulator as accumulators
from ttlaunch.runtime.parallel.zero.accumulator import GradientAccumulator, Receipt

SENDERS = ("a", "b", "c")
PARAMETERS = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}
STEPS = (1, 2)


def gradient(step, parameter, sender):
    """Another one for each key, with values whose sum depends on the order."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * ord(sender) + len(parameter))
    return torch.randn(PARAMETERS[parameter].shape, generator=generator) * 10.0 ** (ord(sender) - ord("b"))


def in_order(step, parameter):
    """The tree over three senders: (a + b) + c."""
    first, second, third = (gradient(step, parameter, sender) for sender in SENDERS)
    return (first + second) + third


KEYS = [(step, parameter, sender) for step in STEPS for parameter in PARAMETERS for sender in SENDERS]
NOISE = [*KEYS, (1, "weight", "stranger"), (1, "no", "a")]


@settings(deadline=None, max_examples=examples(150))
@given(st.permutations(KEYS), st.lists(st.tuples(st.integers(0, 20), st.sampled_from(NOISE)), max_size=12))
def test_any_interleaving_with_repetitions_and_strangers_gives_the_same_sums(order, noise):
    """C1, C3: each (step, parameter, sender) counts once; a sum is ready exactly when the last of its senders has sent."""
    accumulator = GradientAccumulator(PARAMETERS, senders=SENDERS)
    arriving = list(order)
    for place, key in noise:
        arriving.insert(place, key)
    seen, taken, expected = set(), set(), Counter()
    for step, parameter, sender in arriving:
        key = (step, parameter, sender)
        if sender not in SENDERS:
            expected[Receipt.UNKNOWN_SENDER] += 1
        elif parameter not in PARAMETERS:
            expected[Receipt.UNKNOWN_PARAMETER] += 1
        elif any(one == parameter and later >= step for later, one in taken):
            expected[Receipt.LATE] += 1
        else:
            expected[Receipt.DUPLICATE if key in seen else Receipt.COUNTED] += 1
            seen.add(key)
        value = gradient(*key) if key in KEYS else torch.zeros(2, 3)
        accumulator.add(value, step=step, parameter=parameter, sender=sender)
        value.fill_(float("nan"))  # the memory is the sender's
        for one_step, one in {(step, parameter) for step, parameter, _ in KEYS}:
            late = any(other == one and later >= one_step for later, other in taken)
            is_ready = not late and all((one_step, one, name) in seen for name in SENDERS)
            assert is_ready == accumulator.is_ready(step=one_step, parameter=one)
            if is_ready:
                found = accumulator.take_sum(step=one_step, parameter=one)
                assert torch.equal(in_order(one_step, one), found)
                taken.add((one_step, one))
    assert expected == accumulator.receipts
    accumulator.drop(until=max(STEPS))
    assert accumulator.held_bytes == 0


def test_a_thousand_sends_at_once_add_up_exactly():
    """C2, C4: no send is lost, none counts twice, and the memory returns to nothing."""
    count, threads = 1000, 20
    senders = [f"worker {number}" for number in range(count)]
    accumulator = GradientAccumulator({"weight": torch.zeros(64)}, senders=senders)
    begin = threading.Barrier(threads)

    def send(own):
        begin.wait(timeout=20)
        for number in own:
            accumulator.add(torch.full((64,), float(number)), step=1, parameter="weight", sender=senders[number])

    running = [threading.Thread(target=send, args=(range(first, count, threads),)) for first in range(threads)]
    for thread in running:
        thread.start()
    total = accumulator.take_sum(step=1, parameter="weight", timeout_s=20)
    for thread in running:
        thread.join()
    assert torch.equal(torch.full((64,), count * (count - 1) / 2), total)
    assert ({Receipt.COUNTED: count}, 0) == (dict(accumulator.receipts), accumulator.held_bytes)


class Hesitant(set):
    """Lets other threads go first between a look and what follows from it."""

    def __contains__(self, place):
        found = super().__contains__(place)
        time.sleep(0)  # gives the interpreter's lock away
        return found


def test_the_same_gradient_from_many_threads_counts_once(monkeypatch):
    """C1, C2: a transport that repeats what it thinks lost; nobody comes between the look whether it was and the count."""
    whole = accumulators._Sum
    monkeypatch.setattr(accumulators, "_Sum", lambda: whole(Hesitant()))
    accumulator = GradientAccumulator({"bias": torch.zeros(3)}, senders=["a", "b"])
    begin = threading.Barrier(8)

    def send():
        begin.wait(timeout=20)
        accumulator.add(torch.ones(3), step=1, parameter="bias", sender="a")

    running = [threading.Thread(target=send) for _ in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    accumulator.add(torch.ones(3), step=1, parameter="bias", sender="b")
    assert {Receipt.COUNTED: 2, Receipt.DUPLICATE: 7} == accumulator.receipts
    assert [1.0, 1.0, 1.0] == accumulator.take_mean(step=1, parameter="bias").tolist()


def test_who_has_not_sent_is_named():
    """C3."""
    accumulator = GradientAccumulator(PARAMETERS, senders=SENDERS)
    accumulator.add(torch.zeros(3), step=1, parameter="bias", sender="b")
    assert ["a", "c"] == accumulator.missing(step=1, parameter="bias")
    with pytest.raises(TimeoutError, match="no gradient of `bias` of step 1 from a, c"):
        accumulator.take_sum(step=1, parameter="bias")


def test_a_sum_is_taken_once():
    """C4."""
    accumulator = GradientAccumulator(PARAMETERS, senders=["a"])
    accumulator.add(torch.zeros(3), step=3, parameter="bias", sender="a")
    accumulator.take_sum(step=3, parameter="bias")
    assert Receipt.LATE == accumulator.add(torch.zeros(3), step=2, parameter="bias", sender="a")
    with pytest.raises(ValueError, match="the sum of `bias` of step 3 or of a later one has been taken"):
        accumulator.take_sum(step=3, parameter="bias")


def test_a_gradient_of_another_shape_is_the_callers_mistake():
    accumulator = GradientAccumulator(PARAMETERS, senders=SENDERS)
    expected = r"a gradient of `bias` is torch.float32 \(2, 3\), expected torch.float32 \(3,\)"
    with pytest.raises(ValueError, match=expected):
        accumulator.add(torch.zeros(2, 3), step=1, parameter="bias", sender="a")
    assert accumulator.held_bytes == 0


def test_a_name_given_twice_is_the_callers_mistake():
    with pytest.raises(ValueError, match="2 senders have 1 different names"):
        GradientAccumulator(PARAMETERS, senders=["a", "a"])
