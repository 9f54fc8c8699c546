"""The messages of calls: what is packed is parsed again, and nothing else is."""

import random

import pytest

from ttlaunch.runtime.comm.grpc.frames import CHUNK_BYTES, BadFrameError, Frame, Kind, pack, parse
from ttlaunch.runtime.comm.grpc.pieces import MOST_HEADER_BYTES, Piece, PieceKind, pack_piece, parse_piece
from ttlaunch.runtime.comm.grpc.vectors import Key

KEY = Key("blocks.0.weight", 2**40, 5, 9, start=4, size=2, epoch=3)
PIECE = Piece(PieceKind.PIECE, KEY, 7, 8, 16, memoryview(b"01234567"))


def test_a_message_arrives_as_it_was_sent():
    for piece in (PIECE, Piece(PieceKind.WHICH, KEY), Piece(PieceKind.BEAT, Key("", 0, 0, 0), 2**32 - 1)):
        assert piece == parse_piece(pack_piece(piece))


@pytest.mark.parametrize("key", [KEY._replace(name="x" * 256), KEY._replace(step=-1), KEY._replace(size=2**32)])
def test_a_key_that_fits_no_header_is_refused_before_anything_is_sent(key):
    with pytest.raises(ValueError, match="cannot be sent"):
        pack_piece(Piece(PieceKind.WHICH, key))


@pytest.mark.parametrize(
    "piece",
    [
        Piece(PieceKind.PIECE, KEY, 0, 9, 16, memoryview(b"01234567")),
        Piece(PieceKind.WHICH, KEY, 0, 0, 8, memoryview(b"01234567")),
        Piece(PieceKind.WHICH, KEY._replace(first=10)),
    ],
)
def test_a_message_that_contradicts_itself_is_refused(piece):
    with pytest.raises(BadFrameError):
        parse_piece(pack_piece(piece))


def test_no_damaged_message_is_taken_for_a_whole_one():
    data = pack_piece(PIECE)
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(BadFrameError):
            parse_piece(bytes(damaged))


def test_no_bytes_make_the_parser_raise_anything_else():
    rng, whole = random.Random(1), pack_piece(PIECE)  # noqa: S311 - no secret
    for _ in range(20_000):
        data = bytearray(whole if rng.random() < 0.7 else rng.randbytes(rng.randrange(300)))
        for _ in range(rng.randrange(1, 5)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        cut = bytes(data[: rng.randrange(len(data) + 1)]) if rng.random() < 0.3 else bytes(data)
        if cut != whole:
            with pytest.raises(BadFrameError):
                parse_piece(cut)
    with pytest.raises(BadFrameError):
        parse_piece(bytes(CHUNK_BYTES + MOST_HEADER_BYTES + 1))


def test_a_frame_is_no_message_and_a_message_no_frame():
    with pytest.raises(BadFrameError):
        parse_piece(pack(Frame(Kind.GRANT, 0, 0)))
    with pytest.raises(BadFrameError):
        parse(pack_piece(PIECE) + bytes(40))
