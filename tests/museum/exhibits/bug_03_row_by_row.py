"""Bug 3: each row is quantized by itself in a Python loop; right, and many times slower than the training it is to speed up."""

import torch


def through_int8(values_N):
    rows = []
    for row in values_N.view(-1, 256):  # the bug
        scale = (row.abs().max() / 127).clamp_min(1e-38)
        rows.append((row / scale).round() * scale)
    return torch.cat(rows)
