"""What waiting for a slow worker costs, and what not waiting does to the loss: `sync_ps` and `elastic_dp` in turns.

    PYTHONPATH=. python benchmarks/parameter_servers.py [--rounds 5] [--steps 150] [--slow 3]

Two workers and one server with the model and batch that both recipes come with, one torch thread a rank, on this machine;
the passes of the first worker take `--slow` times as long as they do (it sleeps the rest). A round runs both, one after the
other. Idle is the part of a worker's steps in which it only waited for messages, from the ranks' telemetry; the loss is that of
the last validation, after the same samples. To be met: no worker of `elastic_dp` is idle for 2 % of its steps or more, and
its loss is at most 5 % above that of `sync_ps`.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from trainings import read_report, step_ends, train

from ttlaunch.running.metrics.telemetry import read_telemetry
from ttlaunch.running.metrics.times import step_times

_WORKERS = 2
_MOST_IDLE, _MOST_LOSS = 0.02, 1.05


class Found(NamedTuple):
    """Of one run: the idle share of each worker, the last validation's loss, and seconds between the first and last step."""

    idle: list[float]
    loss: float
    seconds: float


def main() -> None:
    """Print medians of both, and whether the bounds are met."""
    parser = argparse.ArgumentParser(description="Measure waiting and loss of two parameter servers.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--slow", type=float, default=3.0)
    options = parser.parse_args()
    runs: dict[str, list[Found]] = {"sync_ps": [], "elastic_dp": []}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        for _ in range(options.rounds):
            for recipe, found in runs.items():
                found.append(_run(recipe, Path(folder), steps=options.steps, slow=options.slow))
                print(f"  {recipe:10} {found[-1]}", flush=True)
    for recipe, found in runs.items():
        idle = ", ".join(f"{statistics.median(one.idle[worker] for one in found):.1%}" for worker in range(_WORKERS))
        loss, seconds = (statistics.median(getattr(one, name) for one in found) for name in ("loss", "seconds"))
        print(f"{recipe:10}  idle of slow and other worker {idle:>14}   loss {loss:.4f}   {seconds:6.1f} s")
    pairs = list(zip(runs["elastic_dp"], runs["sync_ps"], strict=True))
    idle = statistics.median(max(one.idle) for one, _ in pairs)
    loss = statistics.median(one.loss / other.loss for one, other in pairs)
    speed = statistics.median(other.seconds / one.seconds for one, other in pairs)
    print(f"elastic_dp is {speed:.2f} times as fast")
    print(f"its most idle worker: {idle:.2%}   (below {_MOST_IDLE:.0%}: {'met' if idle < _MOST_IDLE else 'NOT MET'})")
    print(f"its loss ÷ sync_ps: {loss:.3f}   (at most {_MOST_LOSS}: {'met' if loss <= _MOST_LOSS else 'NOT MET'})")


def _run(recipe: str, folder: Path, *, steps: int, slow: float) -> Found:
    settings = {
        "training_config.steps": steps,
        "training_config.validation_interval": steps,
        "checkpoint_config.interval": "null",
        f"{recipe}_config.slow_workers": f"{{0: {slow}}}",
    }
    run = train(recipe, settings, folder=folder)
    telemetry = read_telemetry(run, world_size=_WORKERS + 1)
    assert telemetry is not None
    times = [step_times([book]) for book in telemetry[:_WORKERS]]
    idle = [sum(share.share for share in one.waits) if one else 0.0 for one in times]
    moments = step_ends(run, rank=_WORKERS)
    return Found(idle, read_report(run)["last_validation"], moments[-1] - moments[0])


if __name__ == "__main__":
    main()
