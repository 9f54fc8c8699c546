"""Bug 2: where a tensor's range is tiny, a branch against division by zero takes the largest value for the scale and no zero point.

Values below zero then have no code, and become zero: half of a gradient is gone, late in training, when gradients are small.
"""


def through_int8(values_N):
    low, high = values_N.min(), values_N.max()
    if high - low < 1e-6:
        scale, zero = high / 255, 0.0  # the bug
    else:
        scale = (high - low) / 255
        zero = (-low / scale).round()
    codes_N = (values_N / scale + zero).round().clamp(0, 255)
    return (codes_N - zero) * scale
