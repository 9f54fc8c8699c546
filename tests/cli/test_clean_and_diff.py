"""`ttlaunch runs clean` and `ttlaunch diff`: only what is over goes; what differs is named with where it came from."""

import json
import os
import time
from dataclasses import asdict

import pytest

from ttlaunch import contract
from ttlaunch.app.slurm_job import note_start, write_job
from ttlaunch.running.runs.clean import _REMOVED, measure, parse_age, remove
from ttlaunch.running.runs.launcher import Launcher, this_process
from ttlaunch.running.runs.overview import summarise

TRAIN = """\
multihost_config:
  num_workers: 2  # recipes/mine/train.yaml:3
training_config:
  learning_rate: {rate}  # {origin}
  data_path: "a # b: c"  # --set
"""


@pytest.fixture
def make_run(here, tmp_path_factory, monkeypatch):
    """`make_run(name, …)`: the folder of a run that is over, or goes on; other tests' runs are not in its registry."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))

    def make(
        name, *, days=0, status="done", launcher=None, losses=(), rate="0.1", origin="--set", tree="aa", layout="two"
    ):
        run = here / "runs" / name
        for folder in (contract.LOGS_DIR, contract.RECORDS_DIR, contract.CHECKPOINTS_DIR):
            (run / folder).mkdir(parents=True)
        rows = [{"rank": 0, "host": "box", "slot": 0, "role": "worker"}]
        plan = {"recipe": {"name": "mine"}, "layout": layout, "ranks": rows, "environment": {}}
        (run / contract.PLAN_FILE).write_text(json.dumps(plan))
        (run / contract.TRAIN_FILE).write_text(TRAIN.format(rate=rate, origin=origin))
        (run / contract.CODE_FILE).write_text(json.dumps({"recipe": {"tree": tree}, "commit": "c0", "diff": ""}))
        (run / contract.ENVIRONMENT_FILE).write_text(json.dumps({"python": "3.11.7", "versions": {"torch": "2.13"}}))
        (run / contract.progress_file(0)).write_text(
            "".join(
                contract.record_line({"kind": "step", "time": 1.0, "step": n + 1, "loss": x})
                for n, x in enumerate(losses)
            )
        )
        (run / "checkpoints/shard").write_bytes(b"x" * 1_000_000)
        if status:
            report = run / contract.REPORT_FILE
            report.write_text(json.dumps({"status": status, "exit_status": 0, "steps": len(losses)}))
            os.utime(report, (time.time() - days * 86400 - 60,) * 2)
        if launcher:
            (run / contract.LAUNCHER_FILE).write_text(json.dumps(asdict(launcher)))
        return run

    return make


OLD, NEW, LIVE, FAR = (f"2026-08-2{day}T10-14-07-000{day}" for day in range(1, 5))


def test_clean_removes_what_is_over_and_keeps_what_may_go_on(ttlaunch, make_run, here):
    make_run(OLD)
    make_run(LIVE, status=None, launcher=this_process())
    make_run(FAR, status=None, launcher=Launcher("far", "b", 1, 1))
    answer = ttlaunch("runs clean --yes")
    assert answer.status == 0
    heading, total, done = answer.stdout.splitlines()
    assert [OLD, "done", "mine"] == [heading.split()[0], heading.split()[1], heading.split()[-1]]
    assert (True, True) == (total.startswith("1 run, 1.0 MB"), total.endswith("; 2 runs that may be active stay"))
    assert done.startswith("removed 1 run, 1.0 MB")
    assert [LIVE, FAR] == sorted(path.name for path in (here / "runs").iterdir())


def test_clean_by_age_and_number(ttlaunch, make_run, here):
    for name, days in ((OLD, 9), (NEW, 8), (LIVE, 1), (FAR, 0)):
        make_run(name, days=days)

    def going(options):
        said = ttlaunch(f"runs clean --dry-run --format json {options}")
        return [one["run_id"] for one in json.loads(said.stdout)["runs"]]

    assert [OLD, NEW] == going("--older-than 7d")
    assert [OLD] == going("--older-than 7d --keep 3")
    assert [OLD, NEW, LIVE] == going("--keep 1")
    assert [] == going("--keep 9")
    assert [OLD, NEW, LIVE, FAR] == sorted(path.name for path in (here / "runs").iterdir())


def test_what_a_killed_clean_has_left_goes_with_the_next(make_run, here):
    run = make_run(OLD)
    (summary,) = summarise([run])
    left = here / "runs" / f"{_REMOVED}-{OLD}/checkpoints"
    left.mkdir(parents=True)
    (left / "shard").write_bytes(b"x")
    assert remove(summary)
    assert [] == list((here / "runs").iterdir())


def test_a_run_that_somebody_else_has_removed_is_no_mistake(make_run):
    run = make_run(OLD)
    (summary,) = summarise([run])
    assert remove(summary)
    assert not remove(summary)
    assert 0 == measure(summary).size_bytes


def test_names_with_newlines_do_not_look_like_two_runs(ttlaunch, make_run):
    make_run("evil\nname")
    assert ttlaunch("runs clean --dry-run").stdout.splitlines()[0].startswith("evil\\nname   done")
    (_, row) = ttlaunch("ps --all").stdout.splitlines()
    assert ("evil\\nname", "runs/evil\\nname") == (row.split()[0], row.split()[-1])


def test_clean_removes_nothing_of_a_job_that_slurm_cannot_be_asked_about(ttlaunch, make_run, here, monkeypatch):
    run, folder = make_run("a", status="time limit"), here / "runs/job-1"
    folder.mkdir()
    write_job(folder, number="7", name="train", submitted=1.0)
    note_start(folder, run, restarts=0)
    monkeypatch.setenv("PATH", "/nonexistent")
    answer = ttlaunch("runs clean --yes")
    assert (0, "0 runs, 0 bytes; 1 run that may be active stay\n") == (answer.status, answer.stdout)
    assert (True, True) == (run.exists(), folder.exists())


def test_clean_asks_and_without_a_terminal_removes_nothing(ttlaunch, make_run):
    run = make_run(OLD)
    answer = ttlaunch("runs clean")
    assert answer.status == contract.STATUS_USAGE
    assert answer.stderr == (
        "error[P043]: nothing was removed: there is no terminal to ask on\n\n"
        "hint: `--yes` removes without asking, `--dry-run` only lists what would be removed\n\n"
    )
    assert run.is_dir()


def test_clean_refuses_an_age_that_is_none(ttlaunch, make_run):
    answer = ttlaunch("runs clean --older-than 7days --yes")
    assert answer.status == contract.STATUS_USAGE
    assert answer.stderr == (
        "error[P042]: `--older-than 7days` is no time\n\nhint: `--older-than 7d`; the units are s, min, h, d and w\n\n"
    )


def test_a_link_to_a_run_is_not_followed(ttlaunch, make_run, here):
    run = make_run(OLD)
    run.rename(here / "elsewhere")
    run.symlink_to(here / "elsewhere")
    ttlaunch("runs clean --yes")
    assert (here / "elsewhere" / contract.PLAN_FILE).is_file()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 90),
        ("30min", 1800),
        ("12h", 43200),
        ("7d", 604800),
        ("2w", 1209600),
        *((t, None) for t in ("7", "d", "-1d", "1m", "")),
    ],
)
def test_ages_are_read(text, expected):
    assert expected == parse_age(text)
