"""Give mutated frames to whole runs with a hostile host: each run ends, and its report names that host and no other.

Rank 0 runs behind a real agent on this machine, rank 1 on a host whose agent sends the mutated frames over each connection
(`tests/security/hostile.py`). What rank 0 has sent must stand. A case is made from the seed and its number alone.

    python benchmarks/fuzz_runs.py [--seed 1] [--first 0] [--count 200] [--jobs 8] [--agents]

With `--agents`, agents start the ranks, so the mutated frames also tell how those of the hostile host have ended.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import LIMIT_MB, peak_mb
from fuzz_hosts import frames

from tests.security.hostile import GOOD_WORDS, EndedRun, HostileHost, greeting, run_beside
from ttlaunch import contract

LONGEST_S = 60.0


def main() -> int:
    """Run all cases, and print how many ended as promised, the slowest, and the memory beside its limit."""
    parser = argparse.ArgumentParser(description="Fuzz whole runs with a hostile host.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--agents", action="store_true", help="agents start the ranks")
    parser.add_argument("--one", type=int, help="run this case here, and print its result as JSON")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one_run(options.seed, options.one, by_agents=options.agents)))
        return 0
    began = perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        numbers = range(options.first, options.first + options.count)
        results = list(pool.map(lambda number: _in_a_process(options.seed, number, by_agents=options.agents), numbers))
    wrong = [result for result in results if result["wrong"]]
    peak, slowest = (max(result[name] for result in results) for name in ("peak_mb", "seconds"))
    print(
        f"{options.count} runs in {perf_counter() - began:.0f} s: {options.count - len(wrong)} ended as promised, the slowest "
        f"after {slowest:.0f} s (limit {LONGEST_S:.0f} s), peak memory {peak:.0f} MB (limit {LIMIT_MB} MB)"
    )
    for result in wrong:
        print(f"case {result['number']}: {result['wrong']}")
    return 1 if wrong or peak > LIMIT_MB else 0


def _in_a_process(seed: int, number: int, *, by_agents: bool) -> dict:
    """The result of a case in a process of its own: a supervisor is one, and handles its signals."""
    command = [
        sys.executable,
        __file__,
        "--seed",
        str(seed),
        "--one",
        str(number),
        *(["--agents"] if by_agents else []),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"number": number, "wrong": "it did not end", "peak_mb": 0.0, "seconds": LONGEST_S}
    except subprocess.CalledProcessError as error:
        return {"number": number, "wrong": error.stderr[-900:], "peak_mb": 0.0, "seconds": 0.0}


def one_run(seed: int, number: int, *, by_agents: bool = False) -> dict:
    """Do one case, and say what is wrong with its end; empty if nothing is."""
    dice = random.Random(f"{seed} runs {number}")  # noqa: S311 - made again from its number
    target = frames()
    said = target.make(dice, target.samples).content
    target.close()
    first = greeting() if dice.random() < 0.9 else b""
    with tempfile.TemporaryDirectory(prefix="ttl-fuzz-", ignore_cleanup_errors=True) as folder:
        began, wrong = perf_counter(), ""
        try:
            ended = run_beside(HostileHost("evil", lambda: first + said), Path(folder), by_agents=by_agents)
            if ended.report is None:
                wrong = "" if "evil" in ended.text else f"nobody is named: {ended.text}"
            else:
                wrong = _wrong_end(ended)
        except Exception:  # noqa: BLE001 - any of them is the finding
            wrong = traceback.format_exc(limit=-4)[-900:]
        return {"number": number, "wrong": wrong, "peak_mb": peak_mb(), "seconds": perf_counter() - began}


def _wrong_end(ended: EndedRun) -> str:
    """What is wrong with the end of a run that began; empty if nothing is."""
    failure, ranks = ended.report.failure, ended.report.ranks
    if failure is None:
        # A host may say that its own rank has ended well.
        return "" if ranks[1]["status"] == 0 else f"nobody is blamed: {ended.text}"
    if "evil" not in ended.text.partition("\n")[0]:
        return f"another is blamed: {ended.text}"
    if ranks[0]["status"] != 0 or (ended.folder / contract.stdout_file(0)).read_bytes() != GOOD_WORDS:
        return f"what rank 0 sent does not stand: {ended.text}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
