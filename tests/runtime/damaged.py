"""Messages that a parser must refuse, and with nothing else than `BadFrameError`."""

import random

import pytest

from ttlaunch.runtime.comm.grpc.frames import BadFrameError


def refuses_each_flipped_bit(parse, whole):
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(BadFrameError):
            parse(bytes(damaged))


def refuses_any_other_bytes(parse, whole, *, longest):
    """Messages have up to `longest` bytes."""
    rng = random.Random(1)  # noqa: S311 - no secret
    for _ in range(20_000):
        data = bytearray(whole if rng.random() < 0.7 else rng.randbytes(rng.randrange(300)))
        for _ in range(rng.randrange(1, 5)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        cut = bytes(data[: rng.randrange(len(data) + 1)]) if rng.random() < 0.3 else bytes(data)
        if cut != whole:
            with pytest.raises(BadFrameError):
                parse(cut)
    with pytest.raises(BadFrameError):
        parse(bytes(longest + 1))
