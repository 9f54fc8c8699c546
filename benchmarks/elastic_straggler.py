"""One of four workers of an elastic run at a quarter of the speed of the others: how long a step takes, and whether the bits stay.

    PYTHONPATH=. python benchmarks/elastic_straggler.py [--times 3] [--micro-batch 0.2]

Each micro-batch of `data_parallel` sleeps that long, and four times as long at worker 3, beside the little that it computes, so that four workers
fit on fewer cores. Equal parts of 16 micro-batches make a step as long as four of the slow worker's. Work that could be divided
anywhere would take 16 / (the sum of the workers' speeds in micro-batches a second, as they measure them); whole micro-batches cannot be
divided so well. To be met: once work has been divided anew, the median step takes at most 1.35 times that, and the SHA-256 is that of
one process. With 8 micro-batches that is impossible, because each worker has at least one.

Each round is a line in `.benchmarks/elastic_straggler.jsonl`; the same command goes on after the last one, whatever code it was
made with. Ends with 1 if a limit is missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.runtime.elastic import elastic_runs
from tests.runtime.elastic.elastic_runs import ElasticRun, in_one_process
from ttlaunch import contract

KEPT = Path(__file__).parents[1] / ".benchmarks" / "elastic_straggler.jsonl"
LIMIT = 1.35
_WORKERS, _SLOWER, _MICRO_BATCHES, _STEPS = 4, 4, 16, 40
_CONFIG = {
    "training_config": {"steps": _STEPS, "micro_batch_size": 1, "validation_interval": _STEPS},
    "transformer_config": {"num_blocks": 1},
    "multihost_config": {"socket_type": "grpc"},
}


def main() -> int:
    """Make the rounds that are missing, and print what all have shown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--micro-batch", type=float, default=0.2, help="seconds of a fast worker's micro-batch")
    options = parser.parse_args()
    elastic_runs.SECONDS = 600.0  # the tests' own runs are shorter
    KEPT.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    while len(lines) < options.times:
        with tempfile.TemporaryDirectory() as place:
            lines.append(_round(Path(place), options.micro_batch))
        with KEPT.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    missed = 0
    for line in lines:
        missed += line["ratio"] > LIMIT or not line["is_same"]
        bits = "as in one process" if line["is_same"] else "DIFFERENT"
        print(
            f"a step {line['after_s']:.2f} s, in equal parts {line['before_s']:.2f} s: {line['ratio']:.2f} times the ideal"
        )
        paces = ", ".join(f"{pace:.2f}" for pace in line["paces_s"])
        print(f"{'':7}seconds of a micro-batch {paces}")
        print(f"{'':7}parts of the micro-batches {line['blocks']}; SHA-256 {bits}")
    print(f"{missed} of {len(lines)} missed (at most {LIMIT} times the ideal)")
    return int(missed > 0)


def _round(place: Path, micro_batch_s: float) -> dict[str, Any]:
    faults = {
        (
            number,
            "in a micro-batch",
            "every step",
        ): f"import time; time.sleep({micro_batch_s * (_SLOWER if number == _WORKERS - 1 else 1)})"
        for number in range(_WORKERS)
    }
    (place / "run").mkdir()
    run = ElasticRun(place / "run", _CONFIG, first=_WORKERS, faults=faults)
    try:
        run.finish()
    finally:
        run.close()
    times = {record["step"]: record["time"] for record in run.of_kind(0, contract.KIND_STEP)}
    begun, last = run.epochs[-1].applied, max(times)
    before = [times[step] - times[step - 1] for step in range(4, begun)]
    after = [times[step] - times[step - 1] for step in range(begun + 2, last + 1)]
    after_s = statistics.median(after)
    paces = [_pace(run, number) for number in range(_WORKERS)]
    ideal_s = _MICRO_BATCHES / sum(1 / pace for pace in paces)
    return {
        "before_s": statistics.median(before),
        "after_s": after_s,
        "ratio": after_s / ideal_s,
        "paces_s": paces,
        "blocks": [stop - first for first, stop in run.epochs[-1].blocks],
        "is_same": {run.digest(number) for number in range(_WORKERS)} == {in_one_process(place / "one", _CONFIG)[0]},
    }


def _pace(run: ElasticRun, number: int) -> float:
    """Return the seconds that a worker needed for a micro-batch, as it reported them last."""
    reports = run.of_kind(number, contract.KIND_MEMBER)
    return float(next(one["pace_s"] for one in reversed(reports) if one.get("pace_s")))


if __name__ == "__main__":
    sys.exit(main())
