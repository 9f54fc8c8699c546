"""The ways in which a rank is broken for `benchmarks/attribution.py`. Standard library only."""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path

_PIECE = 16 * 1024 * 1024
_ROOM = 256 * 1024 * 1024


def break_if_due(*, rank: int, role: str, step: int) -> None:
    """Break this rank if `fault.json` in the working folder says that it is its turn."""
    order = json.loads(Path("fault.json").read_text())
    if order["step"] == step and order["role"] == role and order["rank"] in {rank, None}:
        break_now(order["fault"])


def break_now(fault: str) -> None:  # noqa: C901 - one way after the other
    """Do not come back."""
    match fault:
        case "raise":
            raise ValueError("bucket 7 is short")
        case "error in one role":
            {}["no such bucket"]
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(3)
        case "SIGKILL" | "closed peers":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSEGV":
            ctypes.string_at(0)
        case "abort in C":
            ctypes.CDLL(None).abort()
        case "out of memory":
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + _ROOM, held + _ROOM))
            _take_all()
        case "out of memory, by the kernel":
            _take_all()
        case "import error":
            importlib.import_module("no_such_module")
        case _:
            raise AssertionError(fault)


def _take_all() -> None:
    pieces = []
    while True:
        pieces.append(bytearray(os.urandom(1)) * _PIECE)
