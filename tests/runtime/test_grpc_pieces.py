"""The messages of calls: what is packed is parsed again, and nothing else is."""

import pytest

from tests.runtime.damaged import refuses_any_other_bytes, refuses_each_flipped_bit
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
    refuses_each_flipped_bit(parse_piece, pack_piece(PIECE))


def test_no_bytes_make_the_parser_raise_anything_else():
    refuses_any_other_bytes(parse_piece, pack_piece(PIECE), longest=CHUNK_BYTES + MOST_HEADER_BYTES)


def test_a_frame_is_no_message_and_a_message_no_frame():
    with pytest.raises(BadFrameError):
        parse_piece(pack(Frame(Kind.GRANT, 0, 0)))
    with pytest.raises(BadFrameError):
        parse(pack_piece(PIECE) + bytes(40))
