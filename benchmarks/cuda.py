"""What holds on a GPU: equal bits, what they cost, and how quick a step is beside a plain PyTorch loop.

    PYTHONPATH=. python benchmarks/cuda.py [--only bits|cost|speed] [--blocks 12] [--width 768] [--length 1024] [--rounds 2]

Needs a CUDA device, and takes about 3 minutes on one H200. Every run is started as a user would, with `ttlaunch run`.

`bits`: a GPT in bfloat16 with texts long enough for attention to be divided among blocks of threads, trained for a few steps in several layouts
whose ranks share the device, and twice in the same one. To be met: one SHA-256.

`cost`: the median step with `device_config.deterministic` ÷ that without it, and whether the latter has the same bits twice.

`speed`: tokens a second of GPT-2 small in bfloat16 and the share of the device's peak (MFU), beside a loop of a few lines with torch's own fused
AdamW and no launcher, `plain_gpt/train.py`, in turns. To be met: at least 0.95 of its tokens a second.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.trainings import median_step_s, read_report, train

HERE = Path(__file__).parent
LIMIT = 0.95
TOKENS = 400_000
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Floating-point operations a second in dense bfloat16, by the maker's data sheets."""
LAYOUTS = [
    ("data_parallel", 1, {}),
    ("data_parallel", 1, {}),
    ("data_parallel", 2, {}),
    ("hierarchical_parallel", 4, {}),
    ("zero", 2, {}),
    ("pipeline_parallel", 2, {}),
]


def main() -> int:
    """Print the tables; status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description="Equal bits and speed on a GPU.")
    parser.add_argument("--only", choices=("bits", "cost", "speed"))
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this machine has no CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    parts = {"bits": show_bits, "cost": show_cost, "speed": show_speed}
    with tempfile.TemporaryDirectory(prefix="ttl-bench-") as folder:
        ids = torch.randint(chosen.vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
        head = f"ttlaunch token ids, of a vocabulary of {chosen.vocabulary}"
        (Path(folder) / "ids.txt").write_text("\n".join([head, *map(str, ids)]), encoding="utf-8")
        met = [show(chosen, Path(folder)) for name, show in parts.items() if chosen.only in {None, name}]
    return 0 if all(met) else 1


def settings(
    chosen: argparse.Namespace, folder: Path, *, steps: int, blocks: int, micro: int, count: int
) -> dict[str, object]:
    """A GPT in bfloat16 on the device, without what is not a step."""
    return {
        "device_config.device": "cuda",
        "training_config.precision": "bf16",
        "training_config.steps": steps,
        "training_config.micro_batch_size": micro,
        "training_config.batch_size": micro * count,
        "training_config.validation_interval": steps,
        "training_config.validation_sequences": 2,
        "training_config.learning_rate": 3e-4,
        "scheduler_config.warmup_steps": 2,
        "checkpoint_config.interval": "null",
        "training_config.tokenizer_type": "ids",
        "training_config.data_path": folder / "ids.txt",
        "transformer_config.num_blocks": blocks,
        "transformer_config.num_heads": max(1, chosen.width // 64),
        "transformer_config.embedding_dim": chosen.width,
        "transformer_config.max_sequence_length": chosen.length,
    }


def show_bits(chosen: argparse.Namespace, folder: Path) -> bool:
    """Train the same model in several layouts, and compare the hashes."""
    hashes = []
    for recipe, ranks, more in LAYOUTS:
        given = settings(chosen, folder, steps=4, blocks=2, micro=2, count=4) | more
        if recipe == "pipeline_parallel":
            given |= {"multihost_config.pipeline_parallel_config.blocks_per_rank": "[1, 1]"}
        run = train(recipe, given, folder=folder, words=("-n", str(ranks)))
        found = str(read_report(run)["parameters_sha256"])
        hashes.append(found)
        print(f"bits   {recipe:22} {ranks} ranks  {found[:16]}", flush=True)
    print(f"bits   {len(set(hashes))} class (limit 1)")
    return len(set(hashes)) == 1


def show_cost(chosen: argparse.Namespace, folder: Path) -> bool:
    """Compare steps with and without kernels that add in one order."""
    steps: dict[bool, list[float]] = {True: [], False: []}
    hashes: dict[bool, set[str]] = {True: set(), False: set()}
    for _ in range(2):
        for is_fixed in (True, False):
            given = settings(chosen, folder, steps=12, blocks=chosen.blocks, micro=4, count=2)
            given["device_config.deterministic"] = str(is_fixed).lower()
            run = train("data_parallel", given, folder=folder, words=("-n", "1"))
            steps[is_fixed].append(median_step_s(run, skipped=4))
            hashes[is_fixed].add(str(read_report(run)["parameters_sha256"]))
    quickest = {is_fixed: min(times) for is_fixed, times in steps.items()}
    print(
        f"cost   deterministic {quickest[True] * 1e3:.1f} ms, {len(hashes[True])} hash of 2; "
        f"otherwise {quickest[False] * 1e3:.1f} ms, {len(hashes[False])} of 2; ratio {quickest[True] / quickest[False]:.3f}",
        flush=True,
    )
    return len(hashes[True]) == 1


def show_speed(chosen: argparse.Namespace, folder: Path) -> bool:
    """Compare tokens a second with those of a plain loop, in turns."""
    micro, count, steps = 8, 4, 14
    tokens = micro * count * chosen.length
    sizes = ["--blocks", str(chosen.blocks), "--width", str(chosen.width), "--length", str(chosen.length)]
    sizes += [
        "--vocabulary",
        str(chosen.vocabulary),
        "--micro",
        str(micro),
        "--count",
        str(count),
        "--steps",
        str(steps),
    ]
    ours: dict[bool, list[float]] = {True: [], False: []}
    plain = []
    for _ in range(chosen.rounds):
        for is_fixed in (True, False):
            given = settings(chosen, folder, steps=steps, blocks=chosen.blocks, micro=micro, count=count)
            given["device_config.deterministic"] = str(is_fixed).lower()
            run = train("data_parallel", given, folder=folder, words=("-n", "1"))
            ours[is_fixed].append(median_step_s(run, skipped=4))
        answer = subprocess.run(
            [sys.executable, str(HERE / "plain_gpt" / "train.py"), *sizes], capture_output=True, text=True, check=True
        )
        plain.append(statistics.median(json.loads(answer.stdout)[4:]))
    parameters = chosen.blocks * 12 * chosen.width**2 + chosen.vocabulary * chosen.width
    flops = 6 * parameters + 6 * chosen.blocks * chosen.width * chosen.length  # a causal product has half of the work
    name = torch.cuda.get_device_name()
    peak = next((rate for word, rate in PEAK.items() if word in name), None)
    rates = {"plain loop": tokens / min(plain)}
    rates |= {f"ttlaunch, deterministic {is_fixed}": tokens / min(times) for is_fixed, times in ours.items()}
    for title, rate in rates.items():
        mfu = "" if peak is None else f", MFU {100 * rate * flops / peak:.1f} %"
        print(f"speed  {title:30} {rate:12,.0f} tokens/s{mfu}", flush=True)
    ratio = rates["ttlaunch, deterministic False"] / rates["plain loop"]
    fixed = rates["ttlaunch, deterministic True"] / rates["plain loop"]
    print(f"speed  tokens/s ÷ those of the plain loop: {ratio:.3f} (limit {LIMIT}), deterministic {fixed:.3f}")
    return ratio >= LIMIT


if __name__ == "__main__":
    raise SystemExit(main())
