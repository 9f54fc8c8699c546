"""Sinks for metrics, each with its real library: what was written is read back as its own readers read it (D21, E6)."""

import json
import re
import shutil
import struct
import subprocess
import sys
import time
from importlib import util

import pytest

from ttlaunch import contract
from ttlaunch.running.metrics import export as exporting
from ttlaunch.running.metrics.event_log import EventLog
from ttlaunch.running.metrics.export import SinkRecord, SinkState, export, read_sinks, start_sinks, wait_for_sinks
from ttlaunch.running.metrics.names import metrics_of
from ttlaunch.running.metrics.sinks import SinkChoice, parse_sink
from ttlaunch.running.metrics.to_prometheus import PrometheusSink, render_prometheus
from ttlaunch.running.runs.launcher import write_launcher


@pytest.fixture
def needs(skip_or_fail):
    """`needs("wandb")`: the library, or no test."""

    def check(library):
        if util.find_spec(library) is None:
            skip_or_fail(f"{library} is not installed")

    return check


def in_own_process(run, *words):
    """`ttlaunch metrics` as a user has it: libraries of sinks start threads and processes that no test should keep."""
    argv = [sys.executable, "-m", "ttlaunch", "metrics", str(run.path), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def test_tensorboard_reads_every_metric_of_every_rank(needs, here, finished):
    """D21, E6."""
    needs("tensorboard")
    answer = in_own_process(finished, "--to", "tensorboard=tb")
    assert (0, "") == (answer.returncode, answer.stderr)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    folder = here / "tb" / finished.path.name
    assert ["rank-0-worker", "rank-1-server"] == sorted(path.name for path in folder.iterdir())
    read = EventAccumulator(str(folder / "rank-0-worker"))
    read.Reload()
    losses = read.Scalars("train/loss")
    assert [(step, 4.0 / step) for step in (1, 2, 3, 4)] == [(one.step, pytest.approx(one.value)) for one in losses]
    assert [100.25, 100.5, 100.75, 101.0] == [one.wall_time for one in losses]
    assert [100.0] * 4 == [one.value for one in read.Scalars("communication/gradients/sent_bytes")]
    assert [(0, 0.125)] == [(one.step, one.value) for one in read.Scalars("validation/accuracy")]
    assert [(4, 1.5)] == [(one.step, one.value) for one in read.Scalars("gradients/blocks.0")]
    assert [(4, 3e8)] == [(one.step, one.value) for one in read.Scalars("memory/peak_bytes")]


def wandb_records(path):
    """The records of a W&B file: protocol buffers in LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # a whole record, or its last part
            yield Record.FromString(whole)
            whole = b""


def history(path):
    rows = []
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
    return rows


def summary(path):
    """What a run came to."""
    found = {}
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "summary":
            found |= {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.summary.update}
    return found


@pytest.mark.slow
def test_wandb_has_an_offline_run_for_each_rank_with_the_names_and_keys_of_the_guide(needs, here, finished):
    """D21: `{Algorithm}-{role}-{hostname}_rank{X}_lr{Y}_bs{Z}`."""
    needs("wandb")
    answer = in_own_process(finished, "--to", "wandb=here")
    assert (0, "") == (answer.returncode, answer.stderr)

    files = {}
    for path in (here / "here").glob("wandb/offline-run-*/run-*.wandb"):
        begun = [one.run for one in wandb_records(path) if one.WhichOneof("record_type") == "run"]
        assert {(finished.path.name, "ttlaunch")} == {(run.run_group, run.project) for run in begun}
        files[begun[0].display_name] = path
    assert ["EDP-server-box-1_rank1_lr0.001_bs32", "EDP-worker-box-0_rank0_lr0.001_bs32"] == sorted(files)
    rows = history(files["EDP-worker-box-0_rank0_lr0.001_bs32"])
    assert [(step, 4.0 / step) for step in (1, 2, 3, 4)] == [
        (row["step"], row["train/loss"]) for row in rows if "train/loss" in row
    ]
    events = [event for event in EventLog(finished.path).poll() if event.rank == 0]
    of_steps = {name for event in events if event.step is not None for name in metrics_of(event)}
    assert {"step", *of_steps} == {key for row in rows for key in row if not key.startswith("_")}
    of_the_guide = {"train/loss", "validation/loss", "validation/accuracy", "train/learning_rate", "gradients/blocks.0"}
    assert {*of_the_guide, "train/step_time_s", "train/tokens_per_s"} <= of_steps
    assert {"result/stale gradients": 3.0, "memory/peak_bytes": 3e8, "status": "done"}.items() <= summary(
        files["EDP-worker-box-0_rank0_lr0.001_bs32"]
    ).items()


@pytest.mark.slow
def test_mlflow_has_a_run_with_one_for_each_rank_in_it(needs, here, finished, monkeypatch):
    """E6."""
    needs("mlflow")
    answer = in_own_process(finished, "--to", "mlflow=ml")
    assert 0 == answer.returncode, answer.stderr

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    client = MlflowClient(tracking_uri=(here / "ml").as_uri())
    experiment = client.get_experiment_by_name("elastic_dp")
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    worker = found["EDP-worker-box-0_rank0_lr0.001_bs32"]
    assert {finished.path.name, "EDP-server-box-1_rank1_lr0.001_bs32"} | {worker.info.run_name} == set(found)
    assert found[finished.path.name].info.run_id == worker.data.tags["mlflow.parentRunId"]
    assert {"FINISHED"} == {run.info.status for run in found.values()}
    assert "0.001" == found[finished.path.name].data.params["training_config.learning_rate"]
    losses = client.get_metric_history(worker.info.run_id, "train/loss")
    assert [(step, 4.0 / step, 100000 + 250 * step) for step in (1, 2, 3, 4)] == sorted(
        (one.step, one.value, one.timestamp) for one in losses
    )


LINE = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*\{([a-z]+="(\\.|[^"\\\n])*",?)*\} (NaN|[+-]Inf|-?\d+(\.\d+)?(e[+-]?\d+)?)')


def test_prometheus_finds_the_newest_value_of_everything_in_one_whole_file(here, finished):
    """E6, D25."""
    record = export(finished.path, SinkChoice("prometheus", str(here / "node" / "ttlaunch")), follow=False)
    assert (SinkState.DONE, ["ttlaunch.prom"]) == (record.state, [path.name for path in (here / "node").iterdir()])
    text = (here / "node" / "ttlaunch.prom").read_text()

    lines = text.splitlines()
    assert [] == [line for line in lines if not line.startswith("# TYPE ") and not LINE.fullmatch(line)]
    name = finished.path.name
    whose = f'run="{name}",recipe="elastic_dp",rank="0",role="worker",host="box-0"'
    assert f"ttlaunch_train_loss{{{whose}}} 1" in lines
    assert f'ttlaunch_operation_sent_bytes_total{{{whose},operation="gradients"}} 400' in lines
    assert f"ttlaunch_communication_waited_s_total{{{whose}}} 0.006" in lines
    assert f'ttlaunch_layer_grad_norm{{{whose},layer="embedding"}} 0.25' in lines
    assert f'ttlaunch_run_up{{run="{name}",recipe="elastic_dp"}} 0' in lines
    assert f'ttlaunch_run_done{{run="{name}",recipe="elastic_dp"}} 1' in lines
    types = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert sorted(set(types)) == types


def test_prometheus_is_told_of_nasty_labels_and_values():
    labels = (("host", 'a "quoted" \\ name\nwith a line'),)
    values = {("m", labels): float("nan"), ("n", ()): float("inf"), ("o", ()): 0.5}

    assert (
        '# TYPE m gauge\nm{host="a \\"quoted\\" \\\\ name\\nwith a line"} NaN\n'
        "# TYPE n gauge\nn{} +Inf\n# TYPE o gauge\no{} 0.5\n"
    ) == render_prometheus(values)


def test_a_scrape_never_sees_half_a_file(here, finished, monkeypatch):
    """The old file is there, whole, until the new one takes its place."""
    sink = PrometheusSink(EventLog(finished.path).run, here / "m.prom")
    (here / "m.prom").write_text("old\n")
    seen = []
    replace = type(here).replace

    def watched(self, target):
        seen.append(target.read_text())
        return replace(self, target)

    monkeypatch.setattr(type(here), "replace", watched)
    for event in EventLog(finished.path).poll():
        sink.take(event)
    sink.close("done")
    assert ["old\n"] == seen
    assert (here / "m.prom").read_text().endswith("\n")
    assert 0o644 == (here / "m.prom").stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord", "no sink is called 'tensorbord'"),
        ("prometheus=", "`--sink prometheus=` names no place"),
        ("", "no sink is called ''"),
    ],
)
def test_a_sink_that_is_not_known_is_refused(here, text, message):
    found = parse_sink(text, option="--sink", working_folder=here)

    assert ("P046", message) == (found.code, found.message)
    assert text != "tensorbord" or ("did you mean `tensorboard`?",) == found.hints


def test_a_missing_library_is_told_before_anything_starts(ttlaunch, here, monkeypatch):
    """D21: with the command that installs it; a folder of that name, as W&B makes one, is no library."""
    assert 0 == ttlaunch("run data_parallel --dry-run --sink prometheus=m.prom").status  # imports what it needs
    (here / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(here)])
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "wandb")
    answer = ttlaunch("run data_parallel --sink wandb")

    assert (2, "") == (answer.status, answer.stdout)
    assert answer.stderr.startswith(
        "error[P047]: `--sink wandb` needs the Python package `wandb`, which is not installed here\n"
    )
    assert "`pip install 'ttlaunch[wandb]'`, or `pip install wandb`" in answer.stderr
    assert not (here / "runs").exists()


def test_a_place_is_relative_to_where_it_was_typed(here, needs):
    needs("mlflow")
    places = {
        text: str(parse_sink(text, option="--to", working_folder=here))
        for text in ("prometheus=a/b.prom", "mlflow=http://host:5000", "prometheus")
    }
    assert {
        "prometheus=a/b.prom": f"prometheus={here}/a/b.prom",
        "mlflow=http://host:5000": "mlflow=http://host:5000",
        "prometheus": "prometheus",
    } == places


def test_a_sink_asked_for_twice_is_refused(ttlaunch, finished):
    answer = ttlaunch("metrics --to prometheus=a.prom --to prometheus=b.prom")

    assert (2, "") == (answer.status, answer.stdout)
    assert answer.stderr.startswith("error[P046]: the sink prometheus is given twice\n")


def test_a_sink_that_breaks_is_told_and_can_be_fed_again(ttlaunch, finished):
    too_long = "m" * 300
    answer = ttlaunch(f"metrics --to prometheus={too_long}")

    assert (1, "") == (answer.status, answer.stdout)
    assert answer.stderr.startswith("warning[R060]: the sink prometheus has stopped: ")
    assert "training was not touched, and its own log has everything" in answer.stderr
    (record,) = read_sinks(finished.path)
    assert (SinkState.FAILED, 0) == (record.state, record.events)
    assert 0 == ttlaunch("metrics --to prometheus=m.prom").status
    assert [SinkState.DONE] == [one.state for one in read_sinks(finished.path)]


class Broken:
    """A sink whose library breaks at its third event."""

    taken = 0

    def take(self, event):
        self.taken += 1
        if self.taken == 3:
            raise RuntimeError("no route to the server\nwith much more to say")

    def flush(self):
        pass

    def close(self, status):
        raise AssertionError("it was closed although it broke")


def test_a_sink_that_breaks_on_the_way_says_why_in_a_line(finished, monkeypatch):
    monkeypatch.setattr(exporting, "open_sink", lambda choice, run, *, folder: Broken())

    record = export(finished.path, SinkChoice("prometheus", None), follow=False)
    assert (SinkState.FAILED, "RuntimeError: no route to the server") == (record.state, record.error)


def test_a_slow_sink_is_not_waited_for_and_one_that_was_killed_has_failed(finished):
    """The command says so after its patience and leaves; a sink that is there goes on."""
    from ttlaunch.app.sinks import sink_diagnostics  # noqa: PLC0415

    (finished.path / "sinks").mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = SinkRecord("wandb", "w", process.pid, SinkState.WORKING, 3)
        (finished.path / "sinks" / "wandb.json").write_text(json.dumps(vars(record)))
        assert [record] == wait_for_sinks(finished.path, patience_s=0.0)
        process.kill()
    (killed,) = wait_for_sinks(finished.path, patience_s=60.0)
    said = [(one.code, one.message) for one in sink_diagnostics([record, killed], finished.path)]
    assert said == [
        ("R061", "the sink wandb has not finished yet; it continues in the background"),
        ("R060", "the sink wandb has stopped: its process was killed, or there was no room for its last record"),
    ]


def test_a_process_beside_the_run_follows_it_to_its_end(here, written):
    """It is started with the run and ends by itself when the run has a report."""
    run = written()
    write_launcher(run.path)  # we are its launcher, and alive
    start_sinks(run.path, [SinkChoice("prometheus", str(here / "m.prom"))])
    run.steps()
    assert [SinkState.WORKING] == [one.state for one in read_sinks(run.path)]
    run.telemetry()
    run.end()
    (record,) = wait_for_sinks(run.path, patience_s=60.0)

    assert (SinkState.DONE, len(EventLog(run.path).poll())) == (record.state, record.events)
    assert "ttlaunch_run_done" in (here / "m.prom").read_text()


@pytest.mark.parametrize("sink", ["prometheus=/proc/x/m.prom", "tensorboard=/proc/x"])
def test_a_place_in_which_nothing_can_be_made_is_told_in_our_words(ttlaunch, needs, finished, sink):
    """The system lets root write there, until somebody does."""
    needs("tensorboard")
    answer = ttlaunch(f"metrics {finished.path} --to {sink}")
    assert "Error" not in answer.stderr
    assert "Errno" not in answer.stderr
    assert "/proc" in answer.stderr
    assert "cannot be written: " in answer.stderr


@pytest.mark.parametrize(
    ("worked_s", "rested_s"),
    [(0.0, 0.5), (0.001, 0.5), (0.006, 1.2), (3.0, 2.0)],
    ids=["nothing", "little", "some", "much"],
)
def test_a_sink_rests_for_much_longer_than_it_works_and_is_there_when_the_run_ends(
    written, monkeypatch, worked_s, rested_s
):
    now, run = [0.0], written()
    feeder = exporting._Feeder(run.path, SinkRecord("x", "y", 1, SinkState.WORKING), follow=True)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    feeder._rest(worked_s / 0.005)
    assert rested_s == pytest.approx(now[0])

    (run.path / contract.REPORT_FILE).write_text("{}")
    feeder._rest(worked_s / 0.005)
    assert 0.5 == pytest.approx(now[0] - rested_s)


def test_a_run_that_is_removed_while_it_is_followed_ends_the_sending_with_the_reason(written, here):
    run = written()
    write_launcher(run.path)  # this process, so the run goes on
    command = [sys.executable, "-m", "ttlaunch", "metrics", str(run.path), "--follow", "--to"]
    with subprocess.Popen([*command, f"prometheus={here / 'm.prom'}"], stderr=subprocess.PIPE, text=True) as process:
        try:
            until = time.monotonic() + 60
            while not (here / "m.prom").exists() and time.monotonic() < until:
                time.sleep(0.05)
            shutil.rmtree(run.path)
            stderr = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (1, True) == (process.returncode, "has stopped: the run's folder was removed\n" in stderr)
    assert not run.path.exists()


def test_events_that_are_followed_end_when_the_folder_is_removed(written):
    run = written()
    run.steps()
    write_launcher(run.path)
    command = [sys.executable, "-m", "ttlaunch", "metrics", str(run.path), "--follow", "--format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline()
            shutil.rmtree(run.path)
            stderr = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (0, "") == (process.returncode, stderr)
