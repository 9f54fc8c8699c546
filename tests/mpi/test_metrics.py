"""A real run with sinks beside it: its log is whole, its sinks have all of it, and a broken one costs it nothing."""

import json
import subprocess
import sys

import pytest

from tests.forked import FORKED
from ttlaunch.running.metrics.export import read_sinks
from ttlaunch.running.metrics.telemetry import measured, read_telemetry

TINY = ["training_config.steps=4", "training_config.validation_sequences=2", "transformer_config.embedding_dim=16"]
TINY += ["transformer_config.max_sequence_length=16", "training_config.log_layer_grad_norms=true"]


@pytest.mark.mpi
@pytest.mark.core
def test_a_run_with_a_good_and_a_broken_sink_ends_well(here):
    """D20, D25, E6: the events, the sink's file and the counted traffic agree; the broken sink is a warning."""
    words = ["run", "data_parallel", *FORKED, *(word for one in TINY for word in ("--set", one)), "--format", "json"]
    words += ["--sink", "prometheus=m.prom", "--sink", f"tensorboard={'t' * 300}"]
    answer = subprocess.run(
        [sys.executable, "-m", "ttlaunch", *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert 0 == answer.returncode, answer.stderr
    report = json.loads(answer.stdout)
    assert ["R060"] == [one["code"] for one in report["diagnostics"] if one["code"].startswith("R06")]
    (run,) = (here / "runs").glob("20*")
    assert {"prometheus": "done", "tensorboard": "failed"} == {one.kind: str(one.state) for one in read_sinks(run)}

    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["run", "end"] == [events[0]["kind"], events[-1]["kind"]]
    assert [1, 2, 3, 4] == [one["step"] for one in events if one["kind"] == "step" and one["rank"] == 0]
    sent = {0: 0, 1: 0}
    for one in events:
        for numbers in one["values"].get("operations", {}).values():
            sent[one["rank"]] += numbers["bytes"]
    counted = {0: 0, 1: 0}
    for (_, rank, _), (_, size) in measured(read_telemetry(run, world_size=2), until=4).items():
        counted[rank] += size
    assert counted == sent
    text = (here / "m.prom").read_text()
    total = next(line for line in text.splitlines() if line.startswith("ttlaunch_communication_sent_bytes_total"))
    assert counted[0] == float(total.rpartition(" ")[2])
