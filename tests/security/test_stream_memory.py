"""Ranks that report and print very much at once: readers of a run stream it, so their memory stays small."""

import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch.running.metrics.event_log import Event, EventLog, in_order_of_time
from ttlaunch.running.metrics.telemetry import read_telemetry
from ttlaunch.running.metrics.times import step_times

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "stream_memory.py"


@pytest.mark.slow
def test_a_burst_of_100000_steps_and_lines_costs_supervisor_and_view_less_than_80_mb():
    """With everything in lists, they took 362 MB and 109 MB."""
    only = [word for reader in ("supervisor", "view", "logs", "report") for word in ("--only", reader)]
    words = [sys.executable, BENCHMARK, "--steps", "100000", "--lines", "100000", "--limit", "80", *only]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (0, "") == (answer.returncode, answer.stderr), answer.stdout


def write_run(path, *, steps):
    words = "import sys; from pathlib import Path; from stream_memory import write_run; "
    words += f"write_run(Path({str(path)!r}), steps={steps}, lines=100)"
    subprocess.run([sys.executable, "-c", words], cwd=BENCHMARK.parent, check=True)
    return path


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run of 24,000 steps, more than readers hold at a time."""
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps=24_000)


def test_events_that_are_sorted_on_disk_are_those_that_are_sorted_in_memory(tmp_path, monkeypatch):
    run = write_run(tmp_path / "runs" / "run", steps=2_400)
    monkeypatch.setattr("ttlaunch.running.metrics.event_log._HELD_EVENTS", 1_000)
    on_disk = EventLog(run).poll()
    monkeypatch.setattr("ttlaunch.running.metrics.event_log._HELD_EVENTS", 10**9)
    assert EventLog(run).poll() == on_disk
    assert 1 + 2 * (1 + 3 * 1_200) == len(on_disk)


def test_events_of_one_time_keep_their_order_when_they_are_sorted_on_disk(tmp_path):
    events = [Event(float(number % 3), "step", 0, number) for number in range(25_000)]
    found = [one for _, one in in_order_of_time(iter(events), scratch=tmp_path)]
    lines = [one for _, one in in_order_of_time(iter(sorted(events, key=lambda event: event.time)), scratch=tmp_path)]
    assert lines == found
    assert [] == list(tmp_path.iterdir())


def test_times_of_a_long_run_are_those_of_every_second_or_fourth_step(long_run, monkeypatch):
    whole = step_times(read_telemetry(long_run, world_size=2))
    monkeypatch.setattr("ttlaunch.running.metrics.telemetry._MOST_TIMES", 1)
    some = read_telemetry(long_run, world_size=2)
    assert [(12_000, 4, 3_000)] * 2 == [(one.num_steps, one.every, len(one.steps)) for one in some]
    thin = step_times(some)
    assert whole.step.median == pytest.approx(thin.step.median, rel=0.02)
    assert [share.share for share in whole.phases] == pytest.approx([share.share for share in thin.phases], rel=0.02)


def test_equal_rows_of_many_lines_of_telemetry_become_one(long_run):
    rows = read_telemetry(long_run, world_size=2)[0].sent
    assert [(1, 12_000)] == [(row.first, row.last) for row in rows]
