"""Trials of a benchmark that are kept, so that the same command goes on after the last one; no program of its own.

Each trial is a line in `FOLDER/trials.jsonl`. `--fresh` begins again; with `--for-s S` a benchmark ends after the trial in which S
seconds have passed, with status `MISSING` if some are missing.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MISSING = 3
Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser, *, folder: str) -> None:
    """Add the options that `make_missing` takes."""
    parser.add_argument("--for-s", type=float, default=math.inf, help="end after this time; the next call goes on")
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--fresh", action="store_true", help="forget what was kept")


def open_folder(given: argparse.Namespace) -> Path:
    """Return the folder of the trials; the runs in it are registered there, for they are none of the user's."""
    if given.fresh:
        shutil.rmtree(given.folder, ignore_errors=True)
    folder: Path = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    return folder


def make_missing(wanted: Mapping[str, Callable[[], Row]], folder: Path, *, for_s: float) -> list[Row]:
    """Make the trials that are not kept yet, by name, print each, and return all that were wanted and are there."""
    results, last = folder / "trials.jsonl", time.monotonic() + for_s
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    kept: dict[str, Row] = {row["trial"]: row for row in map(json.loads, lines)}
    for name, make in wanted.items():
        began = time.monotonic()
        if name in kept or began > last:
            continue
        made = make()
        kept[name] = {"trial": name, "seconds": round(time.monotonic() - began, 1), **made}
        print(json.dumps(kept[name]), flush=True)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(kept[name]) + "\n")
    return [kept[name] for name in wanted if name in kept]


def exit_status(*, are_met: bool, made: int, wanted: int) -> int:
    """Return 1 if a limit is missed, `MISSING` if trials are missing, else 0."""
    return 1 if not are_met else 0 if made == wanted else MISSING
