"""Fit what a message costs to measured times. Pure."""

from collections.abc import Sequence

_FASTEST = 1e12


def fit_link(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the latency and the bytes a second with which `latency + bytes / rate` is nearest to measured times.

    Args:
        samples: Bytes and seconds of messages of several sizes; at least two.

    The squares of the *relative* errors are as small as possible, because messages of 1 kB and of 8 MB matter alike. Neither
    number is negative.
    """
    ones = sum(1 / time_s**2 for _, time_s in samples)
    sizes = sum(size / time_s**2 for size, time_s in samples)
    squares = sum((size / time_s) ** 2 for size, time_s in samples)
    times = sum(1 / time_s for _, time_s in samples)
    products = sum(size / time_s for size, time_s in samples)
    determinant = ones * squares - sizes**2
    latency_s = (times * squares - sizes * products) / determinant
    each_s = (ones * products - sizes * times) / determinant
    if latency_s < 0:
        latency_s, each_s = 0.0, products / squares
    if each_s < 1 / _FASTEST:
        latency_s, each_s = times / ones, 1 / _FASTEST
    return latency_s, 1 / each_s


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the smallest of some sorted values such that at least `part` of them are not larger."""
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]
