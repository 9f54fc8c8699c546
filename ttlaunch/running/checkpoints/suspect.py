"""Mark checkpoints that may hold what a host has computed wrong: those that were saved after the last clean audit.

A mark is a file beside the manifest, so the manifest and its hashes stay as they are. Whatever the mark says, a checkpoint that has one is
never used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from ttlaunch.records.parser import BadRecord, Step, Word, load, parse, record
from ttlaunch.records.regular_files import read_regular
from ttlaunch.running.runs.files import write_whole

_MARK = "suspect.json"
_MOST_BYTES = 4096


@record
class _Mark:
    """Why a checkpoint is suspect: the step whose audit failed, and the last one before it whose audit was clean."""

    failed: Step
    clean: Step | None
    run: Word


def mark_suspect(
    folders: Iterable[tuple[int, Path]], *, failed: int, clean: int | None, run_id: str
) -> tuple[int, ...]:
    """Mark the checkpoints of a run that were saved after the last clean audit, and return their steps.

    Args:
        folders: Step and folder of each checkpoint, complete or not.
        failed: The step whose audit failed.
        clean: The last step before it whose audit was clean; None: there was none, so all are suspect.
        run_id: The run.

    Raises:
        OSError: A mark cannot be written.
    """
    later = [(step, folder) for step, folder in folders if clean is None or step > clean]
    for _, folder in later:
        write_whole(folder / _MARK, json.dumps({"failed": failed, "clean": clean, "run": run_id}) + "\n")
    return tuple(sorted({step for step, _ in later}))


def is_suspect(folder: Path) -> bool:
    """Whether a checkpoint has a mark, of any content."""
    return (folder / _MARK).exists() or (folder / _MARK).is_symlink()


def suspicion(folder: Path) -> str | None:
    """Return why a checkpoint is suspect, as a clause; None if it is not."""
    if not is_suspect(folder):
        return None
    found: object = None
    with contextlib.suppress(OSError):
        content = load(read_regular(folder / _MARK, most=_MOST_BYTES))
        found = content if isinstance(content, BadRecord) else parse(_Mark, content)
    if not isinstance(found, _Mark):
        return f"it is marked as suspect by its {_MARK}"
    return f"it is suspect: the audit of step {found.failed} found a rank that computes wrong, and {last_clean(found.clean)}"


def last_clean(step: int | None) -> str:
    """Return as a clause which audit was the last clean one; None: none was."""
    return "no audit before was clean" if step is None else f"the last clean one was that of step {step}"
