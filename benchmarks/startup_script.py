"""How long a PyTorch script takes from Enter to the end of its first step: torchrun, ttlaunch, and ttlaunch with `--warm`.

    python benchmarks/startup_script.py [--ranks 2 8] [--rounds 3]

The script has DistributedDataParallel over gloo around a linear layer. Each rank has one thread. The three take turns, and so does who
begins; a figure is the median until the slowest rank has finished its first step, with the processor time of all processes until their
end beside it. To be met: `ttlaunch` with 2 ranks 0.70 of torchrun, `--warm` with 8 ranks on 2 cores 0.45. The last rows compare
`ttlaunch run` of a program that does nothing with the program alone: at most 0.20 s more. Byte code is written first, as pip does
when it installs.
"""

import argparse
import compileall
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ttlaunch

_LIMITS = {(2, "ttlaunch"): 0.70, (8, "--warm"): 0.45}
_MOST_MORE_S = 0.20
_SCRIPT = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(4, 64)).sum().backward()
optimizer.step()
with open("first-" + os.environ["RANK"], "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
"""


def main() -> None:
    """Print medians, processor time and the ratio to torchrun."""
    parser = argparse.ArgumentParser(description="Measure the time from Enter to the first step of a PyTorch script.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    compileall.compile_dir(Path(ttlaunch.__file__).parent, quiet=1)
    for ranks in options.ranks:
        found: dict[str, list[tuple[float, float]]] = {"torchrun": [], "ttlaunch": [], "--warm": []}
        for at in range(options.rounds):
            for kind in sorted(found, reverse=bool(at % 2)):
                found[kind].append(_until_first_step(kind, ranks))
        print(f"{ranks} ranks, {os.cpu_count()} cores, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
        base_s, base_cpu_s = (statistics.median(one[place] for one in found["torchrun"]) for place in (0, 1))
        for kind, values in found.items():
            wall_s, cpu_s = (statistics.median(one[place] for one in values) for place in (0, 1))
            limit = _LIMITS.get((ranks, kind))
            goal = f"   at most {limit:.2f}" if limit else ""
            ratios = f"{wall_s / base_s:.2f}, of processor time {cpu_s / base_cpu_s:.2f}"
            print(f"  {kind:9}{wall_s:7.2f} s{cpu_s:8.2f} s of processors   ratio {ratios}{goal}", flush=True)
    _print_of_nothing(options.rounds)


def _until_first_step(kind: str, ranks: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        (Path(folder) / "train.py").write_text(_SCRIPT)
        if kind == "torchrun":
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]
        else:
            command = ["-m", "ttlaunch", "run", "-n", str(ranks), *(["--warm"] if kind == "--warm" else []), "train.py"]
        began, before = time.time(), _processors_s()
        subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
        cpu_s = _processors_s() - before
        return max(float(path.read_text()) for path in Path(folder).glob("first-*")) - began, cpu_s


def _print_of_nothing(rounds: int) -> None:
    seconds: dict[str, list[float]] = {"alone": [], "ttlaunch": []}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        for _ in range(3 * rounds):
            for kind, found in seconds.items():
                prefix = [sys.executable, "-m", "ttlaunch", "run", "--engine", "agents", "-n", "1", "--"]
                began = time.monotonic()
                subprocess.run(
                    [*(prefix if kind != "alone" else []), "true"], cwd=folder, check=True, capture_output=True
                )
                found.append(time.monotonic() - began)
    more_s = statistics.median(seconds["ttlaunch"]) - statistics.median(seconds["alone"])
    print(f"a program that does nothing: ttlaunch takes {more_s:.2f} s more; at most {_MOST_MORE_S:.2f}")


def _processors_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
