"""Run every cell of the tests that repeat one claim over many recipes, layouts or ways to break.

A run of the tests has a few cells of each (`tests/matrices.py`); this has all, claim by claim, and prints how many passed.

    python benchmarks/matrices.py [--only mpi/test_recipes.py]

Ends with 1 if a cell fails or cannot run.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the claims one after the other."""
    sys.path.insert(0, str(ROOT))
    from tests.matrices import KEPT

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="claims whose name contains this")
    options = parser.parse_args()
    failed = 0
    for claim, kept in KEPT.items():
        if options.only in claim:
            cells = run(claim)
            right = sum(is_right for _, is_right in cells)
            failed += len(cells) - right if cells else 1
            seconds = sum(seconds for seconds, _ in cells)
            sys.stdout.write(
                f"{claim:96} {right:3} of {len(cells):3} passed, {seconds:6.1f} s; {len(kept)} in every run\n"
            )
            sys.stdout.flush()
    sys.stdout.write(f"{failed} failed (at most 0)\n")
    return int(failed > 0)


def run(claim: str) -> list[tuple[float, bool]]:
    """By cell, how long it took and whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--every-cell", f"--junitxml={found}", f"tests/{claim}"]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if answer.returncode:
            sys.stdout.write(answer.stdout)
        cells = ET.parse(found).getroot().iter("testcase") if found.is_file() else []  # noqa: S314 - our own
        return [(float(cell.get("time", 0)), len(cell) == 0) for cell in cells]


if __name__ == "__main__":
    sys.exit(main())
