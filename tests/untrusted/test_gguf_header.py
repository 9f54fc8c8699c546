"""Every count, length, offset and size of a GGUF that is not true of the file ends in one clause (E22)."""

import struct

import pytest

from ttlaunch.untrusted.child import UntrustedError
from ttlaunch.untrusted.gguf_header import _TYPES, BLOCKS, parse_header


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def info(name="a", dims=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def number(key, value):
    return text(key) + struct.pack("<II", 4, value)


TENSOR = info()


def file(*, values=(), tensors=(TENSOR,), data=bytes(16), counts=None, version=3):
    counts = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def test_a_header_has_values_lists_and_places():
    values = [
        number("n", 7),
        text("t") + struct.pack("<I", 8) + text("naïve"),
        text("l") + struct.pack("<IIQ2h", 9, 3, 2, -1, 5),
    ]
    content = file(values=values, tensors=[info("a", (4, 2)), info("b", (32,), 2, 32)], data=bytes(64))
    header = parse_header(content, len(content))
    assert ({"n": 7, "t": "naïve"}, [-1, 5]) == ({k: header.values[k] for k in "nt"}, list(header.values["l"]))
    base = len(content) - 64
    assert [("a", (2, 4), "F32", base, base + 32), ("b", (32,), "Q4_0", base + 32, base + 50)] == [
        (one.name, one.shape, one.kind, one.start, one.end) for one in header.tensors
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "at byte 0 it says that 4 bytes follow, and 0 do"),
        (b"PK\x03\x04" + bytes(60), "it is no GGUF file"),
        (file(version=1), "of version 1 of the format"),
        (file(version=0x03000000), "its numbers are big-endian"),
        (file(counts=(2**64 - 1, 0)), "it says that it has 18446744073709551615 tensors, each of at least 24 bytes"),
        (file(counts=(0, 2**40)), "it says that it has 1099511627776 values"),
        (file(values=[struct.pack("<Q", 2**63)]), "bytes of a key"),
        (file(values=[text("k") + struct.pack("<IQ", 8, 2**62)]), "bytes of `k`"),
        (file(values=[text("k") + struct.pack("<IIQ", 9, 8, 2**60)]), "texts of `k`, each of at least 8 bytes"),
        (file(values=[text("k") + struct.pack("<IIQ", 9, 10, 2**60)]), "numbers of `k`, each of at least 8 bytes"),
        (file(values=[text("k") + struct.pack("<IIQ", 9, 9, 1)]), "`k` is a list of lists"),
        (file(values=[text("k") + struct.pack("<I", 99)]), "`k` is of the unknown type 99"),
        (file(values=[text("k") + struct.pack("<IB", 7, 2)]), "`k` is neither true nor false"),
        (file(values=[text(b"\xff") + struct.pack("<IB", 7, 1)]), "a key at byte 32 is not UTF-8"),
        (file(values=[text("k" * 2000) + struct.pack("<IB", 7, 1)]), "a key has 2000 characters"),
        (file(values=[number("k", 1), number("k", 2)]), "the key `k` occurs twice"),
        (file(values=[number("general.alignment", 0)]), "`general.alignment` is 0"),
        (file(values=[number("general.alignment", 48)]), "`general.alignment` is 48"),
        (file(values=[number("general.alignment", 2**31)]), "`general.alignment` is 2147483648"),
        (file(tensors=[info(), info()], data=bytes(48)), "tensor `a` occurs twice"),
        (file(tensors=[info(dims=(1,) * 5)]), "tensor `a` has 5 dimensions"),
        (file(tensors=[info(dims=())]), r"has the shape \[\]"),
        (file(tensors=[info(dims=(0, 4))]), r"has the shape \[4, 0\]"),
        (file(tensors=[info(dims=(2**40, 2**40))]), "which no tensor has"),
        (file(tensors=[info(dims=(2**40,))]), "tensor `a` ends at byte 4398046511.*, and the file has 80"),
        (file(tensors=[info(offset=2**60)]), "bytes between the header and tensor `a` belong to no tensor"),
        (file(tensors=[info(offset=7)]), "tensor `a` is at 7, which is no multiple of 32"),
        (
            file(tensors=[info("a", (8,)), info("b", (8,), 0, 0)], data=bytes(32)),
            "tensor `b` overlaps tensor `a` by 32 bytes",
        ),
        (file(tensors=[info(kind=12)]), "1 of type Q4_K"),
        (file(tensors=[info(kind=77)]), "1 of type number 77"),
        (file(tensors=[info(dims=(31,), kind=2)]), "rows of 31 values, and Q4_0 has blocks of 32"),
        (file(data=bytes(15)), "tensor `a` ends at byte 80, and the file has 79"),
        (file(data=bytes(16 + 32)), "32 bytes behind tensor `a` belong to no tensor"),
        (file(data=bytes(16))[:-20], "tensor `a` ends at byte"),
    ],
)
def test_what_is_not_true_of_the_file_is_refused(content, said):
    with pytest.raises(UntrustedError, match=said.replace("`", ".")):
        parse_header(content, len(content))


def test_types_are_those_of_the_gguf_package():
    constants = pytest.importorskip("gguf").constants
    assert (
        dict(sorted(_TYPES.items())).items() <= {one.value: one.name for one in constants.GGMLQuantizationType}.items()
    )
    assert {constants.GGMLQuantizationType[name]: sizes for name, sizes in BLOCKS.items()}.items() <= (
        constants.GGML_QUANT_SIZES.items()
    )
