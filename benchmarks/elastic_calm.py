"""One of three workers of an elastic run at a quarter of the speed of the others, for minutes: nobody may be taken for hung or lost.

    PYTHONPATH=. python benchmarks/elastic_calm.py [--minutes 4] [--micro-batch 0.25]

A real `ttlaunch run data_parallel -n 3 --elastic 1:3`. Each micro-batch sleeps that long, and four times as long at worker 2, so that
three workers fit on two cores. After the minutes it is stopped by Ctrl-C. To be met: no worker was lost, left, or waited for as
hung; the only changes of the members are those that give the slow worker less work. Ends with 1 if the limit is missed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ttlaunch.running.membership.journal import epochs_so_far

RECIPE = Path(__file__).parents[1] / "recipes" / "data_parallel"
LINE = "        index, x_BT, y_BT = batch\n"
"""The line of the recipe after which each micro-batch sleeps."""
_WORKERS, _SLOWER = 3, 4
_WAIT_S = 60.0


def main() -> int:
    """Make the run, and print each change of its members."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--micro-batch", type=float, default=0.25, help="seconds of a fast worker's micro-batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, status = _train(Path(place), options.minutes * 60, options.micro_batch)
        first, *later = epochs_so_far(folder)
        steps = (folder / "records" / "rank-0.progress.jsonl").read_text(encoding="utf-8").count('"kind": "step"')
    lost = [change for change in later if change["members"] != first["members"]]
    for change in later:
        print(f"after step {change['step']}: {', '.join(change['reasons'])}")
    print(f"{steps} steps in {options.minutes:g} min, status {status} after Ctrl-C (130)")
    print(f"{len(lost)} false alarms (at most 0); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return int(bool(lost) or steps == 0 or status != 130)


def _train(place: Path, seconds: float, micro_batch_s: float) -> tuple[Path, int]:
    """Train for some seconds; returns the run's folder and the exit status after Ctrl-C."""
    shutil.copytree(RECIPE, place / "calm", ignore=shutil.ignore_patterns("__pycache__"))
    trainer = place / "calm" / "trainer.py"
    text = trainer.read_text(encoding="utf-8")
    assert text.count(LINE) == 1, f"the recipe has not one line `{LINE.strip()}`"
    pause = f"        __import__('time').sleep({micro_batch_s} * ({_SLOWER} if ctx.rank == {_WORKERS - 1} else 1))\n"
    trainer.write_text(text.replace(LINE, LINE + pause), encoding="utf-8")
    keys = {"steps": 1_000_000, "micro_batch_size": 1, "validation_interval": 1_000_000}
    words = [f"--set=training_config.{key}={value}" for key, value in keys.items()]
    command = [str(Path(sys.executable).with_name("ttlaunch")), "run", "./calm", "-n", str(_WORKERS), *words]
    with (place / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, "--elastic", f"1:{_WORKERS}"], cwd=place, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        ends = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(_WAIT_S)
    found = [path for path in (place / "runs").glob("[!.]*-*") if path.is_dir() and not path.is_symlink()]
    assert len(found) == 1, (place / "output").read_text()
    return found[0], status


if __name__ == "__main__":
    sys.exit(main())
