"""The folder of a run with two ranks, as the launcher leaves it, written piece by piece where a test wants that."""

import json

import pytest

from ttlaunch import contract
from ttlaunch.running.runs.run_folder import RunFolder, append_event

STEPS = range(1, 5)
CONFIG = {"training_config": {"learning_rate": 0.001, "batch_size": 32, "steps": 4}}
NORMS = {"embedding": 0.25, "blocks.0": 1.5}


class Written:
    """A run that grows."""

    def __init__(self, path):
        self.path = path

    def plan(self, recipe="elastic_dp", roles=("worker", "server")):
        rows = [
            {"rank": rank, "host": f"box-{rank}", "slot": 0, "role": role, "local_rank": 0}
            for rank, role in enumerate(roles)
        ]
        plan = {"recipe": {"name": recipe, "folder": "/nowhere"}, "layout": "two", "hash": "abc", "config": CONFIG}
        (self.path / contract.RECORDS_DIR).mkdir(parents=True)
        (self.path / contract.PLAN_FILE).write_text(json.dumps({**plan, "ranks": rows}))

    def record(self, rank, **values):
        with (self.path / contract.progress_file(rank)).open("a") as file:
            file.write(contract.record_line(values))

    def steps(self, steps=STEPS):
        append_event(RunFolder(self.path.name, self.path), "start", engine="Open MPI")
        self.record(0, kind="validation", time=100.0, step=0, loss=4.0, perplexity=54.6, accuracy=0.125, tokens=64)
        for step in steps:
            numbers = {"loss": 4.0 / step, "tokens": 50, "grad_norm": 0.5, "learning_rate": 0.001}
            self.record(0, kind="step", time=100.0 + step / 4, step=step, **numbers)
            self.record(1, kind="step", time=100.0 + step / 4, step=step)
        self.record(0, kind="layer_grad_norms", time=101.5, step=4, norms=NORMS)
        self.record(0, kind="result", time=101.75, values={"stale gradients": 3, "network": "eth0"})

    def telemetry(self, rank=0, steps=STEPS):
        """Each step of 6 ms sends two messages, 100 bytes in all, and waits for 1.5 ms."""
        times = {"step": 6000, "forward": 1000, "backward": 3000}
        stretch = {
            "format": contract.TRAFFIC_FORMAT,
            "first": 0,
            "last": steps[-1],
            "facts": {},
            "sent": [
                ["gradients", None, "backward", 1, [[steps[0], steps[-1], 1, 2, 100]]],
                ["losses", None, "start", 1, [[0, 0, 1, 1, 8]]],
            ],
            "waited": [["weights", "exchange", {str(step): 1500 for step in steps}]],
            "spent": [[name, {str(step): us for step in steps}] for name, us in times.items()],
        }
        with (self.path / contract.traffic_file(rank)).open("a") as file:
            file.write(json.dumps(stretch) + "\n")

    def end(self, status="done", exit_status=0):
        for rank in range(2):
            record = {"rank": rank, "time": 103.0 + rank, "status": exit_status, "peak_memory_bytes": 300_000_000}
            (self.path / contract.exit_file(rank)).write_text(json.dumps(record))
        report = {"status": status, "exit_status": exit_status, "steps": 4, "last_validation": 1.0, "ranks": []}
        (self.path / contract.REPORT_FILE).write_text(json.dumps(report))


@pytest.fixture
def written(here):
    """`written(name)`: a run's folder with nothing but its plan."""

    def make(name="2026-01-01T00-00-00-aaaa", **plan):
        run = Written(here / "runs" / name)
        run.plan(**plan)
        return run

    return make


@pytest.fixture
def finished(written):
    """A run that has come to its end."""
    run = written()
    run.steps()
    run.telemetry()
    run.end()
    return run
