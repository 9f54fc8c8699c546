"""The event log: everything a run measured, once, with the rank and the step that it belongs to (D19, D25, E6)."""

import json
import math

import pytest

from ttlaunch import contract
from ttlaunch.running.metrics.event_log import EventLog, write_event_log
from ttlaunch.running.metrics.names import algorithm, metrics_of, rank_run_name, summarise
from ttlaunch.running.metrics.telemetry import measured, read_telemetry


def test_the_log_begins_with_the_run_and_ends_with_its_end(finished):
    events = EventLog(finished.path).poll()

    assert ("run", "end") == (events[0].kind, events[-1].kind)
    first = events[0].values
    assert (1, "elastic_dp", "two", "abc") == tuple(first[name] for name in ("format", "recipe", "layout", "plan_hash"))
    assert [{"rank": 0, "role": "worker", "host": "box-0"}, {"rank": 1, "role": "server", "host": "box-1"}] == first[
        "ranks"
    ]
    assert ("done", 0, 1.0) == tuple(events[-1].values[name] for name in ("status", "exit_status", "last_validation"))
    assert sorted(event.time for event in events[1:-1] if event.kind != "launcher") == [
        event.time for event in events[1:-1] if event.kind != "launcher"
    ]


def test_a_step_says_how_long_it_took_and_how_many_tokens_a_second(finished):
    """D20."""
    steps = [event for event in EventLog(finished.path).poll() if event.kind == "step" and event.rank == 0]

    assert [1, 2, 3, 4] == [event.step for event in steps]
    assert {"loss": 2.0, "tokens": 50, "grad_norm": 0.5, "learning_rate": 0.001, "step_time_s": 0.25} | {
        "tokens_per_s": 200.0
    } == steps[1].values
    assert "step_time_s" not in steps[0].values


def test_a_step_on_images_says_how_many_samples_a_second(written):
    run = written()
    for step in (1, 2):
        run.record(0, kind="step", time=100 + step * 0.25, step=step, samples=50)
    steps = [event for event in EventLog(run.path).poll() if event.kind == "step"]

    assert {"samples": 50, "step_time_s": 0.25, "samples_per_s": 200.0} == steps[1].values


def test_a_step_of_a_member_says_how_many_tokens_it_differentiates_itself_in_a_second(written):
    run = written()
    for step in (1, 2):
        run.record(0, kind="step", time=100 + step * 0.25, step=step, own_tokens=20)
    steps = [event for event in EventLog(run.path).poll() if event.kind == "step"]

    assert {"own_tokens": 20, "step_time_s": 0.25, "own_tokens_per_s": 80.0} == steps[1].values


def test_books_become_times_and_traffic_of_each_step(finished):
    events = EventLog(finished.path).poll()
    times = [event for event in events if event.kind == "times"]
    traffic = [event for event in events if event.kind == "traffic"]

    assert [1, 2, 3, 4] == [event.step for event in times]
    assert {"step_s": 0.006, "forward_s": 0.001, "backward_s": 0.003} == times[0].values
    assert [0, 1, 2, 3, 4] == sorted(event.step for event in traffic)
    assert {
        "gradients": {"messages": 2, "bytes": 100, "waited_s": 0.0},
        "weights": {"messages": 0, "bytes": 0, "waited_s": 0.0015},
    } == traffic[-1].values["operations"]


def test_the_bytes_of_the_log_are_those_of_the_ledger(finished):
    """D25: network metrics equal the counted traffic."""
    finished.telemetry(rank=1)
    found = summarise_bytes(EventLog(finished.path).poll())
    telemetry = read_telemetry(finished.path, world_size=2)

    assert {
        (operation, rank): size for (operation, rank, _), (_, size) in measured(telemetry, until=4).items()
    } == found


def summarise_bytes(events):
    found = {}
    for event in events:
        for operation, numbers in event.values.get("operations", {}).items():
            if numbers["bytes"]:
                key = operation, event.rank
                found[key] = found.get(key, 0) + numbers["bytes"]
    return found


def test_whoever_follows_a_run_sees_the_same_events_once_each(written):
    run = written()
    log = EventLog(run.path)
    assert [] == log.poll()
    run.steps(range(1, 3))
    run.telemetry(steps=range(1, 3))
    before = log.poll()
    assert [] == log.poll()
    assert not log.has_ended
    run.record(0, kind="step", time=100.75, step=3, loss=1.0, tokens=50)
    run.end()
    after = log.poll()
    assert log.has_ended

    def shape(events):
        return sorted((event.kind, event.rank or 0, event.step or 0, event.time) for event in events)

    assert shape(EventLog(run.path).poll()) == shape([*before, *after])
    assert 0.25 == next(event for event in after if event.kind == "step").values["step_time_s"]


def test_the_written_log_holds_the_events_a_line_each(finished):
    finished.record(0, kind="step", time=102.0, step=5, loss=math.nan)
    finished.record(0, kind="parameters", time=102.0, digests={"w": "0" * 64})
    path = write_event_log(finished.path)

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event.kind for event in EventLog(finished.path).poll()] == [line["kind"] for line in lines]
    assert "parameters" not in {line["kind"] for line in lines}
    assert "nan" == next(line for line in lines if line.get("step") == 5)["values"]["loss"]
    assert [] == [line for line in lines if set(line) - {"time", "kind", "rank", "step", "values"}]


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "step", "time": "soon", "step": 5, "loss": 1.0},
        {"kind": "step", "time": 1.0, "step": 5, "loss": "low"},
        {"kind": "step", "time": math.nan, "step": True, "tokens": None},
        {"kind": "layer_grad_norms", "time": 1.0, "step": 4, "norms": [1, 2]},
        {"kind": "result", "values": "good"},
        {"kind": "step", "time": 10**400, "step": 5, "loss": 10**400},
        {"kind": ["list"], "step": {"a": 1}},
        {},
    ],
)
def test_what_cannot_be_used_is_in_no_log(finished, record):
    before = len(EventLog(finished.path).poll())
    finished.record(0, **record)
    events = EventLog(finished.path).poll()

    assert before == len(events)
    assert [] == [name for event in events for name, value in metrics_of(event).items() if not isinstance(value, float)]
    assert before == len(write_event_log(finished.path).read_text().splitlines())


def test_what_a_recipe_writes_by_itself_is_in_the_log(finished):
    finished.record(0, kind="colour", time=101.0, step=4, shade="red", depth=2)
    found = next(event for event in EventLog(finished.path).poll() if event.kind == "colour")
    assert (101.0, 0, 4, {"shade": "red", "depth": 2}) == (found.time, found.rank, found.step, found.values)


def test_a_folder_of_no_run_gets_no_log(tmp_path):
    assert write_event_log(tmp_path) is None
    assert [] == list(tmp_path.iterdir())


def test_every_number_has_a_name(finished):
    """D21, D24: what the training guide lists, and nothing that is no number."""
    named = {name for event in EventLog(finished.path).poll() for name in metrics_of(event)}

    assert {
        *("train/loss", "train/tokens", "train/grad_norm", "train/learning_rate"),
        *("train/step_time_s", "train/tokens_per_s"),
        *("validation/loss", "validation/perplexity", "validation/accuracy", "validation/tokens"),
        *("gradients/embedding", "gradients/blocks.0"),
        *("time/step_s", "time/forward_s", "time/backward_s"),
        *(f"communication/{what}" for what in ("sent_bytes", "sent_messages", "waited_s")),
        *(
            f"communication/{operation}/{what}"
            for operation in ("gradients", "losses", "weights")
            for what in ("sent_bytes", "sent_messages", "waited_s")
        ),
        *("memory/peak_bytes", "result/stale gradients"),
    } == named


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("elastic_dp", "EDP"),
        ("zero", "FSDP"),
        ("sync_ps", "SyncPS"),
        ("classic_dp", "ClassicDP"),
        ("local_sgd", "LocalSgd"),
    ],
)
def test_algorithms_have_the_names_of_the_guide(recipe, expected):
    assert expected == algorithm(recipe)


def test_a_rank_is_named_as_the_guide_names_runs(written):
    """D21: `EDP-worker-macbook_rank1_lr0.001_bs32` is the guide's example."""
    run = EventLog(written(roles=("server", "worker")).path).run

    assert "EDP-worker-box-1_rank1_lr0.001_bs32" == rank_run_name(run, 1)


def test_a_summary_has_first_last_least_and_most(finished):
    finished.record(0, kind="step", time=102.0, step=5, loss=3.0)
    found = {(one.name, one.rank): one for one in summarise(EventLog(finished.path).poll())}

    assert (4.0, 3.0, 1.0, 4.0) == found["train/loss", 0].values
    assert 5 == found["train/loss", 0].count


def test_the_table_of_metrics_names_rank_and_role(ttlaunch, finished):
    """D19."""
    answer = ttlaunch("metrics")

    assert (0, "") == (answer.status, answer.stderr)
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert ["metric", "rank", "role", "times", "first", "last", "least", "most"] == lines[0]
    assert ["train/loss", "0", "worker", "4", "4", "1", "1", "4"] in lines
    assert ["memory/peak_bytes", "1", "server", "1", *["300,000,000"] * 4] in lines


def test_events_are_json_a_line_each(ttlaunch, finished):
    answer = ttlaunch("metrics --format json")

    events = [json.loads(line) for line in answer.stdout.splitlines()]
    assert ["run", "end"] == [events[0]["kind"], events[-1]["kind"]]
    assert contract.read_record(answer.stdout.splitlines()[0])["values"]["run_id"] == finished.path.name
