"""What the telemetry of a rank costs, and whether it agrees with the formulas: `PYTHONPATH=. python benchmarks/traffic_counter.py`.

The first table is the time that counting adds to a message: a socket that does nothing, bare and with telemetry, take turns for
some thousand messages at a time; the processor's time for this thread, medians over the rounds. To be met: 2 µs. Beside
it stands what one message costs between two ranks of one host at least, measured by `benchmarks/communicators.py`.

The second runs every recipe that `ttlaunch simulate` can play, three steps of a small model, and divides what the traffic counter
has by what the formula says, for each operation and edge. To be met: 1.00 ± 0.005 for all of them. (`fully_sharded` needs
processes; `tests/mpi` holds it to the same.)
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from null_communicator import NullCommunicator

from ttlaunch.runtime.comm.counting import CountingCommunicator
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter, operation
from ttlaunch.runtime.world import Rank

ROUNDS, MESSAGES = 41, 2000
LIMIT_US = 2.0
TOLERANCE = 0.005

SMALL = {
    "training_config.steps": "3",
    "training_config.batch_size": "12",
    "training_config.micro_batch_size": "1",
    "training_config.validation_interval": "2",
    "scheduler_config.warmup_steps": "1",
    "transformer_config.embedding_dim": "32",
    "transformer_config.max_sequence_length": "16",
}
_PIPELINE = "multihost_config.pipeline_parallel_config"


def _workers(count: int) -> dict[str, str]:
    return {"multihost_config.num_workers": str(count)}


LAYOUTS = {
    "hierarchical, two tiers, 2 workers": ("hierarchical_parallel", 3, _workers(2)),
    "hierarchical, two tiers, 3 workers": ("hierarchical_parallel", 4, _workers(3)),
    "hierarchical, three tiers, 2 workers": ("hierarchical_parallel", 4, _workers(2)),
    "hierarchical, three tiers, 3 workers": ("hierarchical_parallel", 5, _workers(3)),
    "data parallel, 2 workers": ("data_parallel", 2, _workers(2)),
    "data parallel, 3 workers": ("data_parallel", 3, _workers(3)),
    "pipeline, 2 stages, 1f1b": ("pipeline_parallel", 2, {f"{_PIPELINE}.blocks_per_rank": "[2,2]"}),
    "pipeline, 4 stages, gpipe": (
        "pipeline_parallel",
        4,
        {f"{_PIPELINE}.blocks_per_rank": "[1,1,1,1]", f"{_PIPELINE}.schedule": "gpipe"},
    ),
    "pipeline, 2 stages × 2 replicas": (
        "pipeline_parallel",
        4,
        {f"{_PIPELINE}.blocks_per_rank": "[2,2]", f"{_PIPELINE}.replicas": "2"},
    ),
    "data parallel, 3 workers, int8": ("data_parallel", 3, _workers(3) | {"compression_config.kind": "int8"}),
    "ZeRO 0, 3 workers": ("zero", 3, _workers(3) | {"zero_config.stage": "0"}),
    "ZeRO 2, 3 workers": ("zero", 3, _workers(3) | {"zero_config.stage": "2"}),
    "ZeRO 3, 3 workers": ("zero", 3, _workers(3)),
    "classic, a lead of 2, 3 workers": ("classic_dp", 3, _workers(3) | {"classic_dp_config.staleness_bound": "2"}),
    "asynchronous server, 2 workers": ("elastic_dp", 3, _workers(2)),
    "2 servers, 3 workers": ("sync_ps", 5, _workers(3) | {"sync_ps_config.num_servers": "2"}),
    "local SGD, 3 workers": ("local_sgd", 3, _workers(3) | {"local_sgd_config.every": "2"}),
    "DiLoCo, 3 workers": ("diloco", 3, _workers(3) | {"diloco_config.every": "2"}),
    "2 ranks a model, 2 models": ("tensor_parallel", 4, {"tensor_parallel_config.replicas": "2"}),
    "two tiers, workers of 2 ranks": (
        "hierarchical_parallel",
        5,
        _workers(2) | {"device_config.enable_tp": "true", "device_config.mesh_shape": "[1,2]"},
    ),
}


def main() -> int:
    """Print both tables; status 1 if a limit is missed."""
    missed = print_costs() + print_ratios()
    return 1 if missed else 0


def print_costs() -> int:
    """The time that telemetry adds to a message; how many of the rows miss the limit."""
    plain, telemetry = NullCommunicator(), CountingCommunicator(NullCommunicator(), TrafficCounter())
    ways = {
        "send, operation named": (lambda one: one.send(tensor, dest=Rank(1)), True),
        "send, named after its function": (lambda one: one.send(tensor, dest=Rank(1)), False),
        "recv, operation named": (lambda one: one.recv(tensor, source=Rank(1)), True),
        "isend and wait, operation named": (lambda one: one.isend(tensor, dest=Rank(1)).wait(), True),
        "irecv and wait, operation named": (lambda one: one.irecv(tensor, source=Rank(1)).wait(), True),
    }
    tensor, missed = torch.zeros(4), 0
    print(f"{'a message with telemetry':36} {'bare µs':>8} {'with µs':>8} {'adds µs':>8} {'limit':>6}")
    for name, (act, is_named) in ways.items():
        bare, kept = [], []
        for _ in range(ROUNDS):
            bare.append(_time_us(plain, act))
            if is_named:
                with operation(telemetry, "gradients", bucket=1):
                    kept.append(_time_us(telemetry, act))
            else:
                kept.append(_time_us(telemetry, act))
        before, after = statistics.median(bare), statistics.median(kept)
        missed += after - before > LIMIT_US
        verdict = "met" if after - before <= LIMIT_US else "MISSED"
        print(f"{name:36} {before:8.2f} {after:8.2f} {after - before:8.2f} {LIMIT_US:6.1f} {verdict}")
    return missed


def _time_us(comm, act) -> float:  # noqa: ANN001  either kind of socket
    began = time.thread_time()
    for _ in range(MESSAGES):
        act(comm)
    return (time.thread_time() - began) / MESSAGES * 1e6


def print_ratios() -> int:
    """TrafficCounter ÷ formula, the least and the most over all operations and edges; how many layouts miss the limit."""
    missed = 0
    print(f"\n{'counted ÷ formula':36} {'edges':>6} {'bytes':>12} {'least':>8} {'most':>8}")
    for name, (recipe, ranks, settings) in LAYOUTS.items():
        edges = _edges(recipe, ranks, settings)
        ratios = [edge["ratio"] or 0.0 for edge in edges]
        is_met = bool(ratios) and max(abs(ratio - 1) for ratio in ratios) <= TOLERANCE
        missed += not is_met
        total = sum(edge["bytes"] for edge in edges)
        verdict = "met" if is_met else "MISSED"
        print(f"{name:36} {len(edges):6} {total:12,} {min(ratios):8.4f} {max(ratios):8.4f} {verdict}")
    return missed


def _edges(recipe: str, ranks: int, settings: dict[str, str]) -> list[dict]:
    words = [word for key, value in (SMALL | settings).items() for word in ("--set", f"{key}={value}")]
    command = [str(Path(sys.executable).with_name("ttlaunch")), "simulate", recipe, "--ranks", str(ranks), *words]
    process = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    answer = json.loads(process.stdout)
    if process.returncode or answer.get("traffic") is None:
        raise RuntimeError(f"{recipe} on {ranks} ranks: {process.stdout[-2000:]}{process.stderr[-2000:]}")
    return answer["traffic"]["edges"]


if __name__ == "__main__":
    sys.exit(main())
