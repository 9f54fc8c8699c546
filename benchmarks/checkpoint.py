"""What a checkpoint costs: against the disk, against torch's distributed checkpoint, and against a step.

    PYTHONPATH=. python benchmarks/checkpoint.py [--blocks 6 --blocks 40] [--rounds 15] [--folder DIR]

All write the same tensors. "raw" is one `write` of their bytes and one `fsync`; ours is everything from the call until
`step-N/` stands: copy, SHA-256, shard, record, manifest, flushes and renames. DCP is `torch.distributed.checkpoint.save`
into a new folder with its own `fsync`. Rounds of the three alternate, so that whatever else the disk does meets all of
them; medians are compared. `--folder` says on which disk.

The stall is measured where it would be noticed, in a training loop on one thread: steps with a checkpoint after every
20th and steps without any alternate in blocks, and their mean times are compared. The model and batch are those below.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAN = {"hash": "", "recipe": {"name": ""}, "layout": "", "world_size": 64, "config": {}, "data": None}
STATE = {"data": {"epoch": 0, "sample": 0}, "loss_scaler": None}
INTERVAL, BLOCKS = 20, 10
SIZES = {"num_heads": 4, "embedding_dim": 256, "max_sequence_length": 64}


def main() -> None:
    """Measure and print."""
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument(
        "--blocks", type=int, action="append", help="of the model that is written: 6 and 40; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=options.folder))
    try:
        for blocks in options.blocks or (6, 40):
            _compare_writers(scratch / str(blocks), blocks=blocks, rounds=options.rounds)
        _measure_stall(scratch / "stall")
    finally:
        shutil.rmtree(scratch)


def _compare_writers(scratch: Path, *, blocks: int, rounds: int) -> None:
    scratch.mkdir()
    model, optimizer = _model_and_optimizer(num_blocks=blocks)
    everything = {name: parameter.detach() for name, parameter in model.named_parameters()}
    everything |= {f"optimizer.{name}": tensor for name, tensor in optimizer.named_state()}
    size = sum(tensor.numel() * 4 for tensor in everything.values())
    data = b"".join(tensor.numpy().tobytes() for tensor in everything.values())
    writers = {"raw write + fsync": _raw(data), "ours": _ours(model, optimizer), "torch DCP": _dcp(everything)}
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    for repeat in range(rounds + 1):
        for name, write in writers.items():
            folder = scratch / f"{name}-{repeat}"
            folder.mkdir()
            began = time.perf_counter()
            write(folder, repeat + 1)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
            shutil.rmtree(folder)
            os.sync()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(f"{size / 1e6:.0f} MB in {len(everything)} tensors, {rounds} rounds, medians (fastest to slowest)")
    for name, found in seconds.items():
        spread = f"{min(found) * 1e3:.0f} to {max(found) * 1e3:.0f} ms"
        print(f"  {name:18} {medians[name] * 1e3:7.1f} ms  {size / medians[name] / 1e9:5.2f} GB/s  ({spread})")
    ours = medians["ours"]
    to_raw, to_dcp = medians["raw write + fsync"] / ours, medians["torch DCP"] / ours
    print(f"  ours ÷ raw         {to_raw:.2f} of its speed (at least 0.7: {_verdict(to_raw >= 0.7)})")
    print(f"  ours ÷ torch DCP   {to_dcp:.1f} × its speed (at least 4: {_verdict(to_dcp >= 4)})")
    print(f"  raw ÷ torch DCP    {to_dcp / to_raw:.1f} × its speed")


def _verdict(is_met: bool) -> str:  # noqa: FBT001
    return "met" if is_met else "NOT MET"


def _raw(data: bytes) -> Callable[[Path, int], None]:
    def write(folder: Path, _step: int) -> None:
        descriptor = os.open(folder / "file", os.O_WRONLY | os.O_CREAT, 0o644)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        os.close(descriptor)

    return write


def _ours(model: Any, optimizer: Any) -> Callable[[Path, int], None]:
    from ttlaunch.recipe import CheckpointConfig
    from ttlaunch.running.checkpoints.complete import complete_checkpoints
    from ttlaunch.runtime.checkpoint.checkpoints import Checkpoints
    from ttlaunch.runtime.world import Rank

    checkpoints: dict[str, Checkpoints] = {}

    def write(folder: Path, step: int) -> None:
        if not checkpoints:
            link = folder.parent / "run"
            checkpoints["one"] = Checkpoints(CheckpointConfig(), run_dir=link, rank=Rank(0), lose=print)
        link = folder.parent / "run"
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        checkpoints["one"].save(step, model, optimizer, owners=[Rank(0)], state=STATE)
        checkpoints["one"].finish()
        assert complete_checkpoints(folder, PLAN, run_id="benchmark") == [step]

    return write


def _dcp(tensors: dict[str, Any]) -> Callable[[Path, int], None]:
    import warnings

    import torch.distributed.checkpoint as dcp

    def write(folder: Path, _step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it saves for a single process
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)

    return write


def _measure_stall(folder: Path) -> None:
    from ttlaunch.recipe import CheckpointConfig
    from ttlaunch.runtime.checkpoint.checkpoints import Checkpoints
    from ttlaunch.runtime.world import Rank

    model, optimizer = _model_and_optimizer(num_blocks=4)
    checkpoints = Checkpoints(CheckpointConfig(), run_dir=folder, rank=Rank(0), lose=print)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    calls = []
    for block in range(2 * BLOCKS + 1):
        saves = block % 2 == 1
        began = time.perf_counter()
        for step in range(block * INTERVAL + 1, (block + 1) * INTERVAL + 1):
            _train(model, optimizer, step)
            if saves and step % INTERVAL == 1:  # early, so that writing falls into the block
                called = time.perf_counter()
                checkpoints.save(step, model, optimizer, owners=[Rank(0)], state=STATE)
                calls.append(time.perf_counter() - called)
        if block:
            seconds[saves].append((time.perf_counter() - began) / INTERVAL)
        checkpoints.finish()
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / BLOCKS
    without_s = statistics.median(seconds[False])
    costs = [one / other - 1 for one, other in zip(seconds[True], seconds[False], strict=True)]
    print(f"a checkpoint of {size / 1e6:.0f} MB every {INTERVAL} steps of {without_s * 1e3:.1f} ms")
    stall = statistics.median(calls) / without_s
    print(f"  the call itself    {stall * 100:.2f} % of its step (less than 1: {_verdict(stall < 0.01)})")
    print(f"  all that it costs  {statistics.median(costs) * 100:+.2f} % per step (median of {BLOCKS} pairs of blocks)")


def _train(model: Any, optimizer: Any, step: int) -> None:
    """One step on two micro-batches of random tokens."""
    import torch

    from ttlaunch.runtime.model.losses import summed_loss
    from ttlaunch.runtime.training.optimizers import global_norm

    for micro_batch in range(2):
        tokens_BT = torch.randint(256, (4, 65))
        summed_loss(model(tokens_BT[:, :-1], model.masks(step, micro_batch)), tokens_BT[:, 1:]).backward()
    optimizer.step(step, norm=global_norm(optimizer.squared_norms()))


def _model_and_optimizer(*, num_blocks: int) -> tuple[Any, Any]:
    import torch

    from ttlaunch.recipe import TrainingFile
    from ttlaunch.runtime.model.model import Model
    from ttlaunch.runtime.training.optimizers import build_optimizer

    cfg = TrainingFile.model_validate({"transformer_config": {**SIZES, "num_blocks": num_blocks}})
    model = Model(cfg, vocabulary=256, blocks=range(num_blocks), has_embedding=True, has_head=True)
    model.flatten(torch.device("cpu"))
    optimizer = build_optimizer(cfg, model, total_steps=10**6)
    _train(model, optimizer, 1)
    return model, optimizer


if __name__ == "__main__":
    main()
