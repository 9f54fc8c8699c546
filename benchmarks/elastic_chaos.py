"""Break elastic runs by random faults, and look whether each fault was judged rightly and the bits are those that they have to be.

    PYTHONPATH=. python benchmarks/elastic_chaos.py [--count 100] [--seed 0] [--minutes 10] [--results FILE]

Each plan has one to five faults of `ttlaunch chaos --random`. `data_parallel` and `local_sgd` take turns, with three workers. A run that
makes all steps has to end with the SHA-256 of an undisturbed one, or of the replay of its journal where workers have steps of
their own. One that does not has to name the fault that ended it.

Each run is a line in FILE; the same command goes on after the last one, whatever code it was made with. Ends with 1 if a run was wrong.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.runtime.elastic.local_replay import replay
from ttlaunch import contract
from ttlaunch.running.membership.journal import read_journal

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".benchmarks" / "elastic_chaos.jsonl"
TTLAUNCH = str(Path(sys.executable).with_name("ttlaunch"))
STEPS = ["--set", "training_config.steps=60"]
MOST_S = 600.0


def main() -> int:
    """Make the runs that are missing, and print what all have shown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.results.parent.mkdir(exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    done = _read(options.results)
    while len(done) < options.count and time.monotonic() < ends:
        with tempfile.TemporaryDirectory() as place:
            done.append(_round(len(done), options.seed, Path(place)))
        with options.results.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
    wrong = [line for line in done if not line["is_judged"] or not line["has_bits"]]
    kinds = Counter((line["recipe"], line["status"]) for line in done)
    for (recipe, status), count in sorted(kinds.items()):
        print(f"{recipe:14} {status:12} {count:4}")
    print(f"{len(wrong)} of {len(done)} wrong (at most 0): {[line['number'] for line in wrong]}")
    return int(bool(wrong))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _round(number: int, seed: int, here: Path) -> dict[str, Any]:
    recipe, faults = ("data_parallel", "local_sgd")[number % 2], 1 + number % 5
    drawn = ["--random", str(faults), "--seed", str(1000 * seed + number)]
    command = [TTLAUNCH, "chaos", recipe, "-n", "3", "--elastic", "1:3", *STEPS, *drawn]
    chaos = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=False)
    [folder] = (path for path in here.glob("runs/[!.]*") if path.is_dir())
    report = json.loads((folder / contract.REPORT_FILE).read_text())
    has_bits = report["status"] != "done" or report["parameters_sha256"] == _expected(recipe, folder, here)
    known = {"number": number, "recipe": recipe, "faults": faults, "status": report["status"]}
    return {**known, "is_judged": chaos.returncode == 0, "has_bits": has_bits, "output": chaos.stdout[-2000:]}


def _expected(recipe: str, folder: Path, here: Path) -> str:
    """Return the SHA-256 of a run that no fault has disturbed, or that of the same journal."""
    if recipe == "local_sgd":
        config = json.loads((folder / contract.PLAN_FILE).read_text())["config"]
        journal = [entry for entry in read_journal(folder) if entry["what"] == "epoch"]
        return str(replay(here / "replay", config, journal, recipe=recipe))
    command = [TTLAUNCH, "run", recipe, "-n", "1", *STEPS, "--format", "json", "--runs-dir", str(here / "one")]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    return str(json.loads(done.stdout)["parameters_sha256"])


if __name__ == "__main__":
    sys.exit(main())
