"""The numbers of a run in columns, as the page's index has them, are to the bit those of its events (X1, X7)."""

import json
import random
from array import array
from collections import defaultdict, deque

import pytest

from tests.dashboard.made_run import MadeRun
from ttlaunch import contract
from ttlaunch.records.steps import Steps
from ttlaunch.running.metrics.event_log import Column, EventLog
from ttlaunch.running.metrics.names import metrics_of
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch


def random_line(drawn, first, last):
    """A line of telemetry with several buckets, waits of one operation in several phases, gaps, and steps outside of steps."""
    steps = range(first, last + 1)

    def times():
        some = drawn.sample(steps, drawn.randint(0, len(steps)))
        return {str(step): drawn.randrange(10**7) for step in some}

    operations, phases = ("gradients", "weights", "b/sent_bytes"), ("forward", "backward", "after")
    sent = [
        [
            drawn.choice(operations),
            drawn.choice([None, 0, 1]),
            drawn.choice(phases),
            1,
            [[first, drawn.randint(first, last), drawn.randint(1, 3), drawn.randrange(9), drawn.randrange(2**40)]],
        ]
        for _ in range(drawn.randint(0, 4))
    ]
    waited = [[drawn.choice(operations), drawn.choice(phases), times()] for _ in range(drawn.randint(0, 4))]
    spent = [[phase, times()] for phase in drawn.choices(("step", *phases), k=drawn.randint(0, 4))]
    return {
        "format": contract.TRAFFIC_FORMAT,
        "last": last,
        "facts": {},
        "sent": sent,
        "waited": waited,
        "spent": spent,
    }


def write_steps(run, drawn):
    """Steps of a rank whose numbers change, that goes back at times, whose clock stands still at times, and whose script has names of its own."""
    step, time = 0, 2e9
    for _ in range(40):
        more = drawn.choice(
            [{}, {"own_tokens": 7}, {"step_time_s": 9.0}, {"accuracy": 1}, {"loss": float("nan")}, {"samples": 3}]
        )
        step = max(0, step - drawn.choice([0, 0, 3]))
        for _ in range(drawn.randint(1, 8)):
            step, time = step + drawn.choice([1, 1, 2]), time + drawn.choice([0.25, 1 / 3, 0.0])
            numbers = {"loss": drawn.choice([2.5, 3, 900.0]), "tokens": drawn.randrange(3), "grad_norm": 1 / (1 + step)}
            run.record(1, kind="step", time=time, step=step, **numbers | more)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_have_the_states_that_their_records_give_one_by_one(tmp_path, seed):
    run = MadeRun(tmp_path / "2026-01-01T00-00-00-aaaa")
    run.steps(1, 30)
    write_steps(run, random.Random(seed))  # noqa: S311 - a test repeats itself
    one_by_one, together = (Watch(EventLog(run.path).run, RunFolder(run.path.name, run.path)) for _ in range(2))
    deque(one_by_one.records(), maxlen=0)
    assert Steps in {type(found) for _, found in together.unordered()}
    for mine, other in zip(one_by_one.ranks, together.ranks, strict=True):
        assert vars(mine.spikes) == vars(other.spikes)
        assert {**vars(mine), "spikes": None} == {**vars(other), "spikes": None}


@pytest.mark.parametrize("seed", range(20))
def test_columns_have_the_steps_times_and_bits_of_events(tmp_path, seed):
    drawn = random.Random(seed)  # noqa: S311 - a test repeats itself
    run = MadeRun(tmp_path / "2026-01-01T00-00-00-aaaa")
    run.record(0, kind="validation", time=1e9 + 1, step=2, loss=2.5, perplexity=float("nan"))
    run.steps(1, 30)
    write_steps(run, drawn)
    for rank in (0, 1):
        with (run.path / contract.traffic_file(rank)).open("a") as file:
            for first in (0, 8, 5, 20):  # a rank that begins again counts steps twice
                file.write(json.dumps(random_line(drawn, first, first + 12)) + "\n")
            file.write('{"last": "nothing"}\n')
    run.end()
    events, columns = defaultdict(list), defaultdict(list)
    for event in EventLog(run.path).unordered():
        for name, value in metrics_of(event).items():
            events[event.rank, name].append((event.step, event.time, value))
    for found in EventLog(run.path).unordered_in_columns():
        if isinstance(found, Column):
            assert all(isinstance(one, array) for one in (found.steps, found.times, found.values))
            columns[found.rank, found.name] += zip(found.steps, found.times, found.values, strict=True)
        else:
            for name, value in metrics_of(found).items():
                columns[found.rank, name].append((found.step, found.time, value))
    assert {key: repr(known) for key, known in events.items()} == {key: repr(known) for key, known in columns.items()}
    assert any(name.startswith("communication/") for _, name in events)
