"""A script of short steps for `benchmarks/sink_blocks.py --calm`: it computes for a few ms, sleeps, prints, and times its steps and writes.

Into `times-RANK.jsonl` beside this file go the same numbers as those of `trainer.py` beside it.
"""

import json
import os
import time
from pathlib import Path

HERE = Path(__file__).parent
LINES = int((HERE / "lines.txt").read_text(encoding="utf-8"))
RANK = int(os.environ["RANK"])
_COMPUTES_S, _STEP_S = 0.005, 0.1


def main() -> None:
    """Make steps until the run is ended."""
    step = 0
    with (HERE / f"times-{RANK}.jsonl").open("w", buffering=1, encoding="utf-8") as file:
        while True:
            step += 1
            begin, spent_s, waited_s = time.time(), time.process_time(), _waited_s()
            while time.process_time() - spent_s < _COMPUTES_S:
                pass
            time.sleep(max(0.0, begin + _STEP_S - time.time()))
            writes = [
                _print(f"12:00:00 | worker | INFO | rank {RANK}, step {step}, line {at}: all is well")
                for at in range(LINES)
            ]
            values = [begin, time.time(), time.process_time() - spent_s, _waited_s() - waited_s]
            file.write(json.dumps([step, *values, len(writes), sum(writes), max(writes)]) + "\n")


def _print(line: str) -> float:
    began = time.perf_counter()
    print(line, flush=True)
    return time.perf_counter() - began


def _waited_s() -> float:
    """For how long the main thread could have gone on and had no core."""
    return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


if __name__ == "__main__":
    main()
