"""One replica of a training with torchft, for `benchmarks/elastic.py`; a program of its own, which imports nothing of ttlaunch.

    PYTHONPATH=FOLDER python benchmarks/elastic_torchft.py LIGHTHOUSE --replica 0 --steps 60

Prints a line of JSON for each step that was committed, with the time, and at the end the SHA-256 of the weights. With `--lighthouse`
it is the coordinator instead, and prints its address.
"""

import argparse
import hashlib
import json
import sys
import time
from datetime import timedelta

import torch
from torch import nn

_WIDTH = 1000  # about a million parameters
_COMPUTES_S = 0.05  # a step beside the sums
_LONGEST = timedelta(seconds=60)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lighthouse", help="its address, or `--lighthouse` to be it")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--heartbeat-ms", type=int, default=5000)
    options = parser.parse_args()
    if options.lighthouse == "coordinate":
        _coordinate(options.heartbeat_ms)
    else:
        _train(options.lighthouse, replica=options.replica, steps=options.steps)


def _coordinate(heartbeat_ms: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=heartbeat_ms
    )
    # The address has the name of this host, which need not resolve.
    _print({"address": f"http://127.0.0.1:{server.address().rpartition(':')[2]}"})
    sys.stdin.read()
    server.shutdown()


def _train(lighthouse: str, *, replica: int, steps: int) -> None:
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(_WIDTH, _WIDTH)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=_LONGEST,
        quorum_timeout=_LONGEST,
        connect_timeout=_LONGEST,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, inner)
    batches = 0
    while manager.current_step() < steps:
        before = manager.current_step()
        batch = torch.Generator().manual_seed(1_000_003 * replica + batches)
        batches += 1
        optimizer.zero_grad()  # asks for the members of this step
        x_BD = torch.randn(16, _WIDTH, generator=batch)
        (model(x_BD) - x_BD).square().mean().backward()
        time.sleep(_COMPUTES_S)
        for parameter in model.parameters():
            assert parameter.grad is not None
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        if manager.current_step() > before:
            _print({"step": manager.current_step(), "time": time.time(), "members": manager.num_participants()})
    digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters()))
    _print({"sha256": digest.hexdigest(), "batches": batches})
    manager.shutdown(wait=False)


def _print(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
