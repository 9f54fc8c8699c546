"""What a sink costs a run: steps of `data_parallel` with and without `--sink`, in turns.

    PYTHONPATH=. python benchmarks/sinks.py [--rounds 5] [--steps 400] [--sinks tensorboard wandb mlflow prometheus loki …]

Two workers with the recipe's own model and batch, one torch thread a rank, on this machine: a sink gets no core of its own, so
what it computes, the ranks lose. A round trains once without a sink and once with each; W&B writes without a network. Compared
are the median step, the first 20 left out, which is what goes on costing, and all steps together, in which the seconds are that
a sink takes to load its library. To be met, for each sink and as the median of the rounds: a step at most 3 % longer, and at most
2 % with Loki, whose server, in this process, takes everything at once (`loki`), answers after 2 s (`loki-slow`), says 429, then 500,
and takes what is sent for the third time (`loki-busy`), or is not there (`loki-down`).

The same command goes on after the last run, see `kept_trials.py`.
"""

import argparse
import http.server
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kept_trials import MISSING, Row, add_options, exit_status, make_missing, open_folder
from trainings import median_step_s, step_ends, train

from ttlaunch.running.metrics.export import SinkState, wait_for_sinks

SERVERS = ("loki", "loki-slow", "loki-busy", "loki-down")
SINKS = ("tensorboard", "wandb", "mlflow", "prometheus", *SERVERS)
NONE = "none"
"""The run of a round without a sink."""
LIMIT = 1.03
LOKI_LIMIT = 1.02
_SLOW_S = 2.0
_SKIPPED = 20
_PATIENCE_S = 120.0


class Found(NamedTuple):
    """Of one run: its median step, all steps together, and how many events the sink took."""

    step_s: float
    all_s: float
    events: int


class Server(http.server.BaseHTTPRequestHandler):
    """Stands for Loki; the name before its path says how it behaves."""

    busy_answers = itertools.cycle([429, 500, 204])

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = self.path.split("/")[1]
        if kind == "loki-slow":
            time.sleep(_SLOW_S)
        self.send_response(next(self.busy_answers) if kind == "loki-busy" else 204)
        self.end_headers()


def main() -> int:
    """Print a line for each sink; status 1 if one costs too much."""
    parser = argparse.ArgumentParser(description="Measure what sinks cost a run.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sinks", nargs="+", default=SINKS, choices=SINKS)
    add_options(parser, folder=".benchmarks/sinks")
    given = parser.parse_args()
    folder = open_folder(given)
    os.environ["WANDB_MODE"] = "offline"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    wanted = {
        f"round {number}, {name}, {given.steps} steps": partial(
            _run, number, name, steps=given.steps, port=server.server_port
        )
        for number in range(given.rounds)
        for name in [NONE, *given.sinks][:: 1 if number % 2 else -1]
    }
    kept = make_missing(wanted, folder, for_s=given.for_s)
    found = {(row["round"], row["sink"]): Found(row["step_s"], row["all_s"], row["events"]) for row in kept}
    rounds = [number for number in range(given.rounds) if all((number, name) in found for name in [NONE, *given.sinks])]
    if not rounds:
        return MISSING
    plain = [found[number, NONE] for number in rounds]
    step_ms = statistics.median(one.step_s for one in plain) * 1e3
    print(f"a step of {step_ms:.1f} ms, {len(rounds)} rounds of {given.steps} steps; load {os.getloadavg()[0]:.1f}")
    print(f"{'sink':14} {'events':>7} {'median step':>12} {'least':>7} {'most':>7} {'all steps':>10}")
    is_met = [_report(name, [found[number, name] for number in rounds], plain) for name in given.sinks]
    return exit_status(are_met=all(is_met), made=len(kept), wanted=len(wanted))


def _report(name: str, found: list[Found], plain: list[Found]) -> bool:
    """One line of the table: ratios to the run without a sink of the same round."""
    pairs = list(zip(found, plain, strict=True))
    steps = [one.step_s / other.step_s for one, other in pairs]
    whole = statistics.median(one.all_s / other.all_s for one, other in pairs)
    median = statistics.median(steps)
    limit = LOKI_LIMIT if name in SERVERS else LIMIT
    verdict = "met" if median <= limit else "MISSED"
    line = f"{name:14} {found[0].events:7} {median:12.3f} {min(steps):7.3f} {max(steps):7.3f} {whole:10.3f}"
    print(f"{line}   at most {limit}: {verdict}")
    return median <= limit


def _run(number: int, sink: str, *, steps: int, port: int) -> Row:
    """Train once, with a sink or with none; the folder is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        found = _train(sink, Path(folder), steps=steps, port=port)
    return {"round": number, "sink": sink, **found._asdict()}


def _train(sink: str, folder: Path, *, steps: int, port: int) -> Found:
    settings = {
        "training_config.steps": steps,
        "training_config.validation_interval": steps,
        "checkpoint_config.interval": "null",
    }
    place = f"loki=http://127.0.0.1:{1 if sink == 'loki-down' else port}/{sink}" if sink in SERVERS else sink
    run = train("data_parallel", settings, folder=folder, words=[] if sink == NONE else ["--sink", place])
    ends, records = step_ends(run), wait_for_sinks(run, patience_s=_PATIENCE_S)
    end = SinkState.FAILED if sink == "loki-down" else SinkState.DONE
    if any(one.state is not end for one in records) or len(records) != (sink != NONE):
        raise SystemExit(f"the sink {sink} did not take all of {run}: {records}")
    return Found(median_step_s(run, skipped=_SKIPPED), ends[-1] - ends[0], sum(one.events for one in records))


if __name__ == "__main__":
    sys.exit(main())
