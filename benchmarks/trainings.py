"""A training as a benchmark needs it: started as a user would, over when the call returns, and the times of its steps."""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ttlaunch import contract


def train(recipe: str, settings: Mapping[str, object], *, folder: Path, words: Sequence[str] = ()) -> Path:
    """Train to the end, and leave with the run's own words if it fails.

    Args:
        recipe: Its name or folder.
        settings: By key, for `--set`.
        folder: Gets `runs/`.
        words: More of the command line.

    Returns:
        The folder of the run.
    """
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "ttlaunch", "run", recipe, "--format", "json", *changes, *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(answer.stdout + answer.stderr)
    return folder / "runs" / str(json.loads(answer.stdout)["run_id"])


def read_report(run: Path) -> dict[str, Any]:
    """What came of it."""
    report: dict[str, Any] = json.loads((run / contract.REPORT_FILE).read_text(encoding="utf-8"))
    return report


def step_ends(run: Path, *, rank: int = 0) -> list[float]:
    """When each step of a rank was done, so far."""
    path = run / contract.progress_file(rank)
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [contract.read_record(line) for line in lines]
    return [float(record["time"]) for record in records if record and record["kind"] == contract.KIND_STEP]


def median_step_s(run: Path, *, skipped: int) -> float:
    """The median time between two steps of the first rank, without the first ones, in which buckets are tuned."""
    return statistics.median(after - before for before, after in pairwise(step_ends(run)[skipped:]))
