"""`docs/reference/peer.proto` describes the calls and the messages that ranks really exchange over gRPC."""

import re
import struct
from pathlib import Path

import pytest

from ttlaunch.runtime.comm.grpc.frames import Frame, Kind, Layout, pack
from ttlaunch.runtime.comm.grpc.peers import SERVICE
from ttlaunch.runtime.comm.grpc.pieces import Piece, PieceKind, pack_piece
from ttlaunch.runtime.comm.grpc.services import Services
from ttlaunch.runtime.comm.grpc.vectors import Key

TEXT = (Path(__file__).parents[2] / "docs/reference/peer.proto").read_text(encoding="utf-8")
FORMATS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}


def body(kind, name):
    return re.search(rf"^{kind} {name} \{{$(.*?)^\}}$", TEXT, re.MULTILINE | re.DOTALL)[1]


def read(name, data):
    """The fields of a message, read by what the page says of them; texts and payloads come last."""
    values, at = {}, 0
    for field, comment in re.findall(
        r"^  (?:repeated )?\w+ (\w+) = \d+; +// (.*)$", body("message", name), re.MULTILINE
    ):
        found = re.match(r"([ui]\d+)(?: x (\d+))?(?:, pad (\d+))?", comment)
        if found is None:
            size = values["name_bytes"] if field == "name" else len(data) - at
            values[field], at = data[at : at + size], at + size
            continue
        layout = f"<{found[2] or ''}{FORMATS[found[1]]}"
        numbers = struct.unpack_from(layout, data, at)
        values[field] = list(numbers) if found[2] else numbers[0]
        at += struct.calcsize(layout) + int(found[3] or 0)
    assert at == len(data)
    return values


def test_a_frame_is_laid_out_as_the_page_says():
    frame = Frame(Kind.DATA, 11, 12, 13, 14, Layout(0, (2, 3), 24), 16, memoryview(b"8 bytes!"))
    found = read("Frame", pack(frame))
    assert 0 < found.pop("checksum")
    assert found == {
        "magic": 0x7474,
        "kind": Kind.DATA,
        "dtype": 0,
        "dims": 2,
        "tag": 11,
        "epoch": 13,
        "incarnation": 14,
        "number": 12,
        "shape": [2, 3, 0, 0, 0, 0, 0, 0],
        "offset": 16,
        "total": 24,
        "payload": b"8 bytes!",
    }


def test_a_piece_is_laid_out_as_the_page_says():
    key = Key("weights", step=11, first=12, last=13, start=14, size=15, epoch=16)
    found = read("Piece", pack_piece(Piece(PieceKind.PIECE, key, 17, 18, 26, memoryview(b"8 bytes!"))))
    assert 0 < found.pop("checksum")
    expected = {"magic": 0x7475, "kind": PieceKind.PIECE, "name_bytes": 7, "incarnation": 17, "offset": 18, "total": 26}
    assert found == expected | key._asdict() | {"name": b"weights", "payload": b"8 bytes!"}


@pytest.mark.parametrize("kind", [Kind, PieceKind])
def test_the_kinds_have_the_numbers_of_the_page(kind):
    found = {
        name: int(number)
        for name, number in re.findall(r"^  (\w+) = (\d+);$", body("enum", kind.__name__), re.MULTILINE)
    }
    assert {one.name: int(one) for one in kind} == {name: number for name, number in found.items() if number}


def test_a_rank_answers_the_calls_of_the_page_and_no_others():
    assert f"package {SERVICE.rpartition('.')[0]};" in TEXT
    calls = re.findall(
        r"^  rpc (\w+)\((stream )?\w+\) returns \((stream )?\w+\);$", body("service", "Peer"), re.MULTILINE
    )
    expected = {name: (bool(asks), bool(answers)) for name, asks, answers in calls}
    handlers = Services(None, None).handlers(link=None)
    assert expected == {name: (one.request_streaming, one.response_streaming) for name, one in handlers.items()}
