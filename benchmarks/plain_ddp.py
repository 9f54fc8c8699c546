"""What ttlaunch adds to torch's own data parallelism: `reduction: fast` against a plain script that torchrun starts.

    PYTHONPATH=. python benchmarks/plain_ddp.py [--rounds 5]

The model is a transformer of 4 blocks, 256 wide, on 64 bytes of text (3.3 million parameters, S = 13.2 MB); a step sees 32
sequences in 8 micro-batches of 4, shared by 2 workers; AdamW, and the norm is clipped. Every rank has one thread. The script
(`benchmarks/plain_ddp/train.py`) has DistributedDataParallel over gloo around the same model, torch's fused AdamW and
clipping, and no telemetry, checks, logs or supervisor around it. The two take turns, and so does who begins; a figure is the
median time between two steps of the first rank, the first ten left out. To be met: at most 3 % more than the script.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from trainings import median_step_s, train

_SCRIPT = Path(__file__).parent / "plain_ddp" / "train.py"
_STEPS, _SKIPPED, _WORKERS, _MOST = 50, 10, 2, 1.03
_MODEL = {"vocabulary": 256, "width": 256, "heads": 4, "blocks": 4, "length": 64}
_BATCH, _MICRO_BATCH = 32, 4
_SETTINGS = {
    "training_config.steps": _STEPS,
    "training_config.batch_size": _BATCH,
    "training_config.micro_batch_size": _MICRO_BATCH,
    "training_config.validation_interval": 1000,
    "training_config.validation_sequences": 2,
    "transformer_config.num_blocks": _MODEL["blocks"],
    "transformer_config.num_heads": _MODEL["heads"],
    "transformer_config.embedding_dim": _MODEL["width"],
    "transformer_config.max_sequence_length": _MODEL["length"],
    "multihost_config.num_workers": _WORKERS,
    "checkpoint_config.interval": "null",
    "data_parallel_config.reduction": "fast",
}


def main() -> None:
    """Print medians of both and their ratio."""
    parser = argparse.ArgumentParser(description="Measure data_parallel against a plain torchrun script.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"ttlaunch": [], "torchrun": []}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        for at in range(options.rounds):
            for kind in sorted(seconds, reverse=bool(at % 2)):
                found = _with_ttlaunch(Path(folder)) if kind == "ttlaunch" else _with_torchrun()
                seconds[kind].append(found)
    print(f"{_WORKERS} workers, {_STEPS} steps, {options.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    for kind, found in seconds.items():
        print(f"{kind:10} {statistics.median(found) * 1e3:8.2f} ms   {min(found) * 1e3:.2f} to {max(found) * 1e3:.2f}")
    ratios = [ours / plain for ours, plain in zip(seconds["ttlaunch"], seconds["torchrun"], strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"ttlaunch ÷ torchrun, median of the rounds: {ratio:.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
        f"   (at most {_MOST}: {'met' if ratio <= _MOST else 'NOT MET'})"
    )


def _with_ttlaunch(folder: Path) -> float:
    return median_step_s(train("data_parallel", _SETTINGS, folder=folder), skipped=_SKIPPED)


def _with_torchrun() -> float:
    wanted = {"model": _MODEL, "batch": _BATCH, "micro_batch": _MICRO_BATCH, "steps": _STEPS}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={_WORKERS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [*command, str(_SCRIPT), json.dumps(wanted)], capture_output=True, text=True, check=False, env=environment
    )
    if answer.returncode:
        raise SystemExit(answer.stdout + answer.stderr)
    ends = json.loads(answer.stdout.splitlines()[-1])
    return statistics.median(after - before for before, after in pairwise(ends[_SKIPPED:]))


if __name__ == "__main__":
    main()
