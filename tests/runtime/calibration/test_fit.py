"""What a message costs, fitted to measured times (E9)."""

import pytest

from ttlaunch.runtime.calibration.fit import fit_link, quantile


def test_times_on_a_line_give_the_line():
    samples = [(size, 2e-5 + size / 3e9) for size in (1_000, 32_000, 512_000, 8_000_000)]

    assert pytest.approx((2e-5, 3e9)) == fit_link(samples)


def test_small_and_large_messages_count_alike():
    samples = [(size, (2e-5 + size / 3e9) * error) for size, error in ((1_000, 1.1), (32_000, 0.9), (8_000_000, 1.0))]
    latency_s, bytes_per_s = fit_link(samples)

    assert pytest.approx(2e-5, rel=0.1) == latency_s
    assert pytest.approx(3e9, rel=0.1) == bytes_per_s


@pytest.mark.parametrize("samples", [[(1_000, 1e-3), (1_000_000, 1e-4)], [(1_000, 1e-6), (1_000_000, 5e-2)]])
def test_neither_number_is_negative(samples):
    latency_s, bytes_per_s = fit_link(samples)

    assert latency_s >= 0
    assert 0 < bytes_per_s <= 1e12 * 1.000001


def test_a_quantile_is_one_of_the_values():
    assert (1, 5, 9) == tuple(quantile(range(1, 11), part) for part in (0.1, 0.5, 0.9))
