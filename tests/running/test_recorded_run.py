"""A run of version 0.1.0 is read as that version read it: its report, its metrics, its view, and its checkpoint."""

import json
import shutil
from pathlib import Path

import pytest

from tests.forked import FORKED
from ttlaunch import contract
from ttlaunch.records.parser import BadRecord
from ttlaunch.running.bad_records import BadLine
from ttlaunch.running.metrics.telemetry import read_telemetry
from ttlaunch.running.metrics.trace import read_traces
from ttlaunch.running.runs.facts import read_facts
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch

RECORDED = Path(__file__).parents[1] / "recorded"
ROOT = RECORDED.parents[1]
RUN = "2026-11-22T16-40-50-a581"
OPTIONS = (
    "--set training_config.steps=12 --set checkpoint_config.interval=6 --set transformer_config.num_blocks=1 "
    "--set transformer_config.embedding_dim=16 --set scheduler_config.warmup_steps=2"
)


def filled(text, here):
    return text.replace("@ROOT@", str(ROOT)).replace("@HERE@", str(here))


@pytest.fixture
def old_run(here):
    """Its folder, in `runs/` of the working folder."""
    folder = here / "runs" / RUN
    shutil.copytree(RECORDED / "run", folder)
    for name in ("plan.json", "code.json", "train.yaml", "command.sh"):
        path = folder / name
        path.write_text(filled(path.read_text(), here))
    return folder


def expected(name, here):
    return filled((RECORDED / "expected" / name).read_text(), here)


def test_its_report_is_the_same(old_run, here, ttlaunch):
    answer = ttlaunch(f"report {RUN}")
    before, _, prediction = answer.stdout.partition("\n  prediction ")  # which that version did not make
    assert (0, expected("report.txt", here)) == (answer.status, before)
    assert "bytes between ranks  3,759,472  3,759,472  +0.00%" in prediction
    answer = ttlaunch(f"report {RUN} --format json")
    said = json.loads(answer.stdout)
    assert "ttlaunch.report/1" == said.pop("schema")  # which that version did not name
    assert said.pop("samples_per_s") is None
    assert [] == said.pop("verdict")["memory"]  # its ranks have not counted their tensors
    assert json.loads(expected("report.json", here)) == said


def test_its_view_is_the_same(old_run, here, ttlaunch):
    answer = ttlaunch(f"attach {RUN}")
    steps = ("report a581", "report a581 --plot", "weights export a581 weights.safetensors")
    following = "".join(f"  {'' if at else 'next':16} ttlaunch {step}\n" for at, step in enumerate(steps))
    assert (0, expected("attach.txt", here) + following) == (answer.status, answer.stdout)


def test_its_metrics_are_the_same(old_run, here, ttlaunch):
    answer = ttlaunch(f"metrics {RUN} --format json")
    later = ('"schema": "ttlaunch.metric-event/1", ', '"samples_per_s": null, ')  # which that version did not have
    assert expected("metrics.jsonl", here) == answer.stdout.replace(later[0], "").replace(later[1], "")


def test_every_record_of_it_is_a_typed_one(old_run):
    facts, told = read_facts(old_run), list[BadLine]()
    watch = Watch(facts, RunFolder(RUN, old_run))
    assert len(watch.poll()) > 4 * 12
    assert [] == list(watch.bad.fresh())
    assert all(state.exit is not None and not isinstance(state.exit, BadRecord) for state in watch.ranks)
    assert 4 == len(read_telemetry(old_run, world_size=4, complain=told.append))
    assert all(trace.spans for trace in read_traces(old_run, facts.ranks, complain=told.append))
    assert [] == told


def rounded_values(folder):
    """What was computed after the checkpoint of step 6: losses, norms of gradients and a validation, by rank, kind and step."""
    found = {}
    for rank in range(4):
        for line in (folder / contract.progress_file(rank)).read_text().splitlines():
            record = json.loads(line)
            if record.get("step", 0) > 6:
                numbers = {key: record[key] for key in ("loss", "grad_norm") if key in record}
                found |= {(rank, record["kind"], record["step"], key): value for key, value in numbers.items()}
    return found


@pytest.mark.mpi
@pytest.mark.core
def test_training_goes_on_from_its_checkpoint(old_run, here, start_run):
    """With the losses that it had itself; and if this machine rounds as that one did, with its parameters.

    Kernels differ between makers and generations of CPUs. A machine counts as one that rounds alike if every loss and every
    norm since the checkpoint is equal to the bit.
    """
    run = start_run("hierarchical_parallel", *OPTIONS.split(), *FORKED, "--resume", RUN)
    assert 0 == run.ends(within_s=120), run.stdout + run.stderr
    [folder] = [path for path in here.glob("runs/[!.]*") if path.is_dir() and path.name != RUN]
    before, after = (json.loads((path / "report.json").read_text()) for path in (old_run, folder))
    assert 6 == after["began_from"]["step"]
    assert before["last_validation"] == pytest.approx(after["last_validation"], rel=1e-6)
    expected, found = rounded_values(old_run), rounded_values(folder)
    assert 6 * 4 + 1 == len(expected)
    assert expected == pytest.approx(found, rel=1e-5)
    if expected == found:
        assert before["parameters_sha256"] == after["parameters_sha256"]
