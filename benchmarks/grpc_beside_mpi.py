"""What a step of `data_parallel` costs over gRPC against the same over MPI, on one host and with a model that computes.

    PYTHONPATH=. python benchmarks/grpc_beside_mpi.py [--rounds 3] [--workers 2]

The model is a transformer of 4 blocks, 256 wide, on 64 bytes of text (3.3 million parameters, 13.2 MB of gradients); a step sees 32
sequences in 8 micro-batches of 4. Every rank has one thread. The two transports take turns, and so does who begins; a figure is
the median over the rounds of the median time between two steps of the first rank, the first ten left out. To be met: 1.25 of MPI.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from trainings import median_step_s, read_report, train

_STEPS, _SKIPPED, _MOST = 30, 10, 1.25
_SETTINGS = {
    "training_config.steps": _STEPS,
    "training_config.batch_size": 32,
    "training_config.micro_batch_size": 4,
    "training_config.validation_interval": _STEPS,
    "transformer_config.embedding_dim": 256,
    "transformer_config.num_heads": 4,
    "transformer_config.num_blocks": 4,
    "transformer_config.max_sequence_length": 64,
}


def main() -> None:
    """Print the median time of a step over both transports, their ratio, and whether the parameters are the same."""
    parser = argparse.ArgumentParser(description="Compare steps of data_parallel over gRPC and over MPI.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"mpi": [], "grpc": []}
    digests = set()
    for at in range(options.rounds):
        for transport in sorted(seconds, reverse=bool(at % 2)):
            with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
                settings = {**_SETTINGS, "multihost_config.socket_type": transport}
                run = train("data_parallel", settings, folder=Path(folder), words=["-n", str(options.workers)])
                seconds[transport].append(median_step_s(run, skipped=_SKIPPED))
                digests.add(read_report(run)["parameters_sha256"])
    medians = {transport: statistics.median(values) for transport, values in seconds.items()}
    print(f"{options.workers} workers, {os.cpu_count()} cores, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for transport, values in seconds.items():
        print(
            f"  {transport:5}{1000 * medians[transport]:8.1f} ms   {1000 * min(values):.1f} to {1000 * max(values):.1f}"
        )
    print(f"  ratio{medians['grpc'] / medians['mpi']:8.2f}      at most {_MOST}")
    print(f"  the same parameters: {'yes' if len(digests) == 1 else 'NO'}")


if __name__ == "__main__":
    main()
