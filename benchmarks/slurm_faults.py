"""End runs on hosts of a virtual Slurm in every way, and count what is left: 20 times each, to be continued after an interruption.

    python benchmarks/slurm_faults.py [--times 20] [--results slurm_faults.jsonl]

Needs root, Slurm (Debian: slurm-wlm, munge) and the packages of the tests. Each line of the results is one end of a run; ends that are
in the file already are not repeated. The exit status is 1 if anything was left or a cause was not named.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.command import CommandLine
from tests.cluster.keeper import wait_until
from tests.cluster.slurm import Slurm, slurm_cluster
from tests.cluster.test_slurm_runs import WAIT, leftovers, started

_LEFT_S = 60.0


def _cancel(slurm: Slurm, _process: subprocess.Popen[str]) -> str:
    slurm.run("launcher", ["scancel", "--user=root"])
    return r"Slurm has ended job \d+: CANCELLED"


def _take_down(slurm: Slurm, _process: subprocess.Popen[str]) -> str:
    slurm.update_host("node1", State="DOWN", Reason="a benchmark")
    return "node1"


def _drain(slurm: Slurm, process: subprocess.Popen[str]) -> str:
    slurm.update_host("node1", State="DRAIN", Reason="a benchmark")
    process.send_signal(signal.SIGINT)
    return ""


def _kill_slurmd(slurm: Slurm, process: subprocess.Popen[str]) -> str:
    slurm.kill("slurmd", "node1")
    process.send_signal(signal.SIGINT)
    return ""


def _kill_launcher(_slurm: Slurm, process: subprocess.Popen[str]) -> str:
    process.kill()
    return ""


def _interrupt(_slurm: Slurm, process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    return ""


WAYS = {
    "scancel": _cancel,
    "down": _take_down,
    "drain": _drain,
    "slurmd killed": _kill_slurmd,
    "launcher killed": _kill_launcher,
    "Ctrl-C": _interrupt,
}


def end_one(slurm: Slurm, ttlaunch: CommandLine, way: str) -> dict[str, Any]:
    """Start a run, end it in this way, and return what came of it; Slurm is whole again afterwards."""
    process = started(ttlaunch, "run wait.py --on slurm --nodes 2")
    began = time.monotonic()
    cause = WAYS[way](slurm, process)
    _, stderr = process.communicate(timeout=120)
    try:
        wait_until(lambda: not leftovers(slurm), what="nothing is left", timeout_s=_LEFT_S)
    except TimeoutError:
        left = [str(one) for one in leftovers(slurm)]
    else:
        left = []
    seconds = round(time.monotonic() - began, 1)
    if way == "slurmd killed":
        slurm.start_slurmd("node1")
    if way in {"down", "drain"}:
        slurm.update_host("node1", State="RESUME")
    slurm.cancel_all()
    wait_until(lambda: {"idle"} == set(slurm.states().values()), what="every host is idle", timeout_s=60)
    return {"way": way, "named": bool(re.search(cause, stderr)), "left": left, "seconds": seconds}


def main() -> int:
    """Run what is missing in the results, print a table, and return the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=20)
    options.add_argument("--results", type=Path, default=Path("slurm_faults.jsonl"))
    asked = options.parse_args()
    text = asked.results.read_text(encoding="utf-8") if asked.results.exists() else ""
    results = [json.loads(line) for line in text.splitlines()]
    done = Counter(one["way"] for one in results)
    with tempfile.TemporaryDirectory() as name, slurm_cluster(hosts=2) as slurm:
        Path(name, "wait.py").write_text(WAIT, encoding="utf-8")
        ttlaunch = CommandLine(slurm.cluster, cwd=Path(name))
        for way in [way for number in range(asked.times) for way in WAYS if number >= done[way]]:
            results.append(end_one(slurm, ttlaunch, way))
            with asked.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(results[-1]) + "\n")
            print(json.dumps(results[-1]), flush=True)
    for way in WAYS:
        ends = [one for one in results if one["way"] == way]
        clean = sum(not one["left"] and one["named"] for one in ends)
        print(f"{way:16} {clean} of {len(ends)}, at most {max(one['seconds'] for one in ends)} s")
    return int(any(one["left"] or not one["named"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
