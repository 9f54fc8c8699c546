"""Read generated hostfiles as `mpirun` does, and say where the two differ: `mpirun` is the judge of the format.

Each file is made from its number alone. Progress is kept in `--state`, where a run goes on. Where ttlaunch is stricter
than mpirun the reasons are counted under the name of their rule; anything else that differs is a mistake of ours:

    T005, T014  mpirun takes any text as a name, `a:2`, `10.0.0.999` and `b,c` among them
    T012        mpirun skips a second word without `=`, and sometimes exits without a message
    T013        slots=0, and numbers that do not fit
    T016        two names of one machine, or a host again after a line with slots

mpirun names a host by the part before its first dot, so that is what is compared. To a host on one line without a
number it gives as many slots as the machine has cores; ttlaunch counts one, and writes that into the hostfile of a run.
A comment that ends the file without a line end makes mpirun refuse it without a message; what a run hands it has one.

    python benchmarks/topology_hostfiles.py [--count 10000] [--state FILE] [--processes 2]
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from ttlaunch.diagnostics import Severity, Source
from ttlaunch.spec.topology.hosts import parse_hosts

NODE = re.compile(r"^\s+(?P<name>\S+): slots=(?P<slots>\d+) max_slots=(?P<most>\d+)", re.MULTILINE)
NAMES = [
    "a",
    "b",
    "box-01",
    "box-02",
    "metal-wh-01.lab.org",
    "metal-wh-02.lab.org",
    "10.0.0.1",
    "10.0.0.2",
    "h_1",
    "1h",
]
ODD = ["a:2", "a,b", "10.0.0.999", "-a", "a.", "x@y@z", "joe@a", "[a]", "a=1", "a b"]
WORDS = ["slots=1", "slots=2", "slots = 3", "slots=04", "max_slots=8", "max-slots=4", "slots= 5", "slots=2 max_slots=4"]
ODD_WORDS = ["slots=0", "slots=", "slots=1x", "lots=1", "foo=3", "slots=-1", "slots", "port=22", "slots=2 slots=3",
             "max_slots=1 slots=2", "=", "slots=99999999999", "7"]  # fmt: skip
EXTRAS = ["# note", "", "   ", "// note", "\t"]


def main() -> int:
    """Compare, print the table; the exit status says whether there was a difference that no rule explains."""
    parser = argparse.ArgumentParser(description="Compare the reading of hostfiles with mpirun's.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--state", type=Path, help="Keep the results in this file, and go on from it.")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpirun is None:
        sys.stderr.write("error: there is no mpirun on this machine\n")
        return 2
    results: dict[str, str] = {}
    if options.state and options.state.exists():
        results = json.loads(options.state.read_text())
        results = {number: verdict for number, verdict in results.items() if not verdict.startswith("DIFFERS")}
    began, done = perf_counter(), 0
    todo = [number for number in range(options.count) if str(number) not in results]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        for number, verdict in zip(todo, pool.map(lambda n: _compare(n, mpirun, Path(folder)), todo), strict=True):
            results[str(number)] = verdict
            done += 1
            if options.state and done % 50 == 0:
                options.state.write_text(json.dumps(results))
    if options.state:
        options.state.write_text(json.dumps(results))
    took = perf_counter() - began
    sys.stdout.write(f"{done} hostfiles in {took:.0f} s, {len(results)} in all\n")
    tally = Counter(verdict.split(":")[0] for verdict in results.values())
    for verdict in sorted(tally):
        sys.stdout.write(f"  {verdict:<44} {tally[verdict]:>7}\n")
    wrong = [(number, verdict) for number, verdict in results.items() if verdict.startswith("DIFFERS")]
    for number, verdict in wrong[:10]:
        sys.stdout.write(f"{number} {verdict}\n  {make(int(number))!r}\n")
    return 1 if wrong else 0


def make(number: int) -> str:
    """A hostfile of one to five lines; half of them have something odd."""
    dice = random.Random(number)  # noqa: S311 - made again from its number
    odd = dice.random() < 0.5
    lines = []
    for _ in range(dice.randint(1, 5)):
        name = dice.choice(ODD) if odd and dice.random() < 0.2 else dice.choice(NAMES)
        words = [dice.choice(WORDS)] if dice.random() < 0.7 else []
        if odd and dice.random() < 0.3:
            words = [dice.choice(ODD_WORDS)]
        extra = [dice.choice(EXTRAS)] if dice.random() < 0.3 else []
        lines.append(dice.choice(["", "", " ", "\t"]) + dice.choice([" ", "  ", "\t"]).join([name, *words, *extra]))
    return "\n".join(lines) + dice.choice(["\n", "", "\n\n"])


def _compare(number: int, mpirun: str, folder: Path) -> str:
    text = make(number)
    hosts, found = parse_hosts(Source("hosts.txt", text))
    errors = sorted({each.code for each in found if each.severity is Severity.ERROR})
    ours = [(_short(host.name), host.slots, host.max_slots or 0) for host in hosts]
    bare = {_short(host.name) for host in hosts if host.slots == 1 and host.slots_span == host.span}
    theirs = _read_by_mpirun(text, mpirun, folder / f"{number}.txt")
    if errors and not theirs:
        return "refused by both"
    if errors:
        return f"stricter, {' '.join(errors)}"
    if not theirs:  # a busy machine makes mpirun itself fail now and then
        theirs = next((read for _ in range(3) if (read := _read_by_mpirun(text, mpirun, folder / f"{number}.txt"))), [])
    last = text.rsplit("\n", 1)[-1]
    if not theirs and ("#" in last or "//" in last):
        return "comment without a line end, refused by mpirun"
    if not theirs:
        return f"DIFFERS: accepted by ttlaunch alone as {ours}"
    if ours == theirs:
        return "read alike"
    if ours == [(name, 1 if name in bare else slots, most) for name, slots, most in theirs]:
        return "read alike, but for the cores of a bare host"
    return f"DIFFERS: {ours}, mpirun says {theirs}"


def _short(name: str) -> str:
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def _read_by_mpirun(text: str, mpirun: str, path: Path) -> list[tuple[str, int, int]]:
    path.write_text(text)
    # As root mpirun wants two consents.
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_prte_tmpdir_base": str(path.parent),
    }
    command = [mpirun, "--do-not-launch", "--display", "allocation", "--bind-to", "none"]
    command += ["--hostfile", str(path), "-n", "1", "hostname"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    path.unlink()
    first = done.stdout.split("ALLOCATED NODES")[1:2]
    return [(node["name"], int(node["slots"]), int(node["most"])) for part in first for node in NODE.finditer(part)]


if __name__ == "__main__":
    sys.exit(main())
