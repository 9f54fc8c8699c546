"""Bug 1: int8 with a zero point that is clamped to the range of a byte.

For values that are all positive, or all negative, the zero point lies outside of it, and most of every value is lost.
"""


def through_int8(values_N):
    low, high = values_N.min(), values_N.max()
    scale = ((high - low) / 255).clamp_min(1e-12)
    zero = (-low / scale).round().clamp(0, 255)  # the bug
    codes_N = (values_N / scale + zero).round().clamp(0, 255)
    return (codes_N - zero) * scale
