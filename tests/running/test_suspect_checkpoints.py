"""Checkpoints after the last clean audit are marked and never used again, and what a run goes back to stays (E23)."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lab.recorded_runs import record_run
from tests.lab.test_audits import LAYOUTS, defective
from tests.runtime.layouts import watch_records
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import mark_later_checkpoints, newest_step, remove_old
from ttlaunch.running.checkpoints.resume import find_checkpoint, verify
from ttlaunch.running.restarts import Attempt, GiveUp, plan_restart
from ttlaunch.running.runs.run_folder import RunFolder


def steps_in(run):
    return sorted(int(path.name.removeprefix("step-")) for path in (run / contract.CHECKPOINTS_DIR).iterdir())


def test_what_was_saved_after_the_last_clean_audit_is_never_resumed_from(tmp_path):
    """Audits in steps 2, 4 and 6, checkpoints in 1 to 5: the audit of step 6 fails, and step 5 is in doubt."""
    recipe, changed = LAYOUTS["data_parallel"]
    audits = {"training_config.audit_interval": 2, "multihost_config.num_workers": 3}
    kept = {"checkpoint_config.interval": 1, "checkpoint_config.keep": 9}
    wrong = defective(1, steps={6}, audits=False, times=1)
    run = record_run(recipe, tmp_path / "runs", changed=changed | audits | kept, during=wrong)
    assert [1, 2, 3, 4, 5] == steps_in(run)
    watch = watch_records(run, 3)

    mark_later_checkpoints(RunFolder(run.name, run), watch.audits)

    found = find_checkpoint(str(run), runs_folder=tmp_path / "runs", working_folder=tmp_path)
    assert (4, 4) == (found.checkpoint.step, newest_step(run))
    said = (
        "it is suspect: the audit of step 6 found a rank that computes wrong, and the last clean one was that of step 4"
    )
    assert [("step-5", said)] == [(one.path.name, one.reason) for one in found.passed_over]
    by_path = find_checkpoint(str(run / "checkpoints/step-5"), runs_folder=tmp_path, working_folder=tmp_path)
    assert (None, said) == (by_path.checkpoint, by_path.passed_over[0].reason)


def newest_usable(run):
    found = find_checkpoint(str(run), runs_folder=run.parent, working_folder=run.parent)
    return found.checkpoint and found.checkpoint.step, {one.path.name: one.reason for one in found.passed_over}


def every_step_saved(runs_dir, during=None):
    """Audits in steps 2, 4 and 6, and a checkpoint of each step; the launcher is killed before it writes a report."""
    recipe, changed = LAYOUTS["data_parallel"]
    keys = {
        "training_config.audit_interval": 2,
        "multihost_config.num_workers": 3,
        "checkpoint_config.interval": 1,
        "checkpoint_config.keep": 9,
    }
    run = record_run(recipe, runs_dir, changed=changed | keys, during=during)
    (run / contract.REPORT_FILE).unlink()
    return run


def test_a_launcher_that_is_killed_before_it_marks_leaves_nothing_suspect_to_resume_from(tmp_path):
    run = every_step_saved(tmp_path / "runs", during=defective(1, steps={6}, audits=False, times=1))

    step, passed_over = newest_usable(run)

    assert (4, ["step-5"]) == (step, list(passed_over))
    assert passed_over["step-5"].startswith("it is suspect: the audit of step 6 found a rank that computes wrong")
    by_path = find_checkpoint(str(run / "checkpoints/step-5"), runs_folder=tmp_path, working_folder=tmp_path)
    assert (None, True) == (by_path.checkpoint, (run / "checkpoints/step-5/suspect.json").exists())


def test_what_was_saved_before_an_audit_that_the_launcher_did_not_live_to_see_is_in_doubt(tmp_path):
    run = every_step_saved(tmp_path / "runs")
    assert (7, {}) == newest_usable(run)  # all steps are done
    for step in (6, 7):
        shutil.rmtree(run / f"checkpoints/step-{step}")
    for rank in range(3):  # rank 0 has said what it found in step 6, and the others have come as far as step 5
        path = run / contract.progress_file(rank)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (audited,) = [at for at, line in enumerate(lines) if '"kind": "audit"' in line and '"step": 6' in line]
        path.write_text("".join(lines[: audited + (rank == 0)]), encoding="utf-8")

    step, passed_over = newest_usable(run)

    said = "it is in doubt: the audit of step 6 was under way when the launcher was killed, and the last clean one was that of step 4"
    assert (4, {"step-5": said}) == (step, passed_over)
    assert not (run / "checkpoints/step-5/suspect.json").exists()
    (run / contract.REPORT_FILE).write_text("{}", encoding="utf-8")  # no launcher was killed
    assert (5, {}) == newest_usable(run)


@pytest.mark.parametrize("content", ["", "{}", "[", '{"failed": -1, "clean": 2, "run": "x"}', "x" * 100_000])
def test_a_mark_counts_whatever_is_in_it(tmp_path, content):
    (tmp_path / "suspect.json").write_text(content, encoding="utf-8")
    assert "it is marked as suspect by its suspect.json" == verify(tmp_path)


def test_without_a_failed_audit_nothing_is_marked(tmp_path):
    (tmp_path / "checkpoints/step-3").mkdir(parents=True)
    audits = SimpleNamespace(disputed=None, clean=2)
    mark_later_checkpoints(RunFolder("x", tmp_path), audits)
    assert [] == list((tmp_path / "checkpoints/step-3").iterdir())


@pytest.mark.parametrize(
    ("proven", "left"), [(None, [8, 10]), (1, [8, 10]), (4, [4, 8, 10]), (7, [6, 8, 10]), (99, [8, 10])]
)
def test_the_newest_checkpoint_that_an_audit_covers_is_not_removed(tmp_path, proven, left):
    for step in (2, 4, 6, 8, 10):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
    remove_old(tmp_path, keep=2, keep_every=None, proven=proven)
    assert left == steps_in(tmp_path)


def attempt(**more):
    known = {"folder": Path("x"), "exit_status": contract.STATUS_AUDIT, "comes_again": False, "steps": 9}
    return Attempt(**(known | more))


def test_a_restart_leaves_out_every_host_that_an_audit_has_found_to_compute_wrong():
    first, second = attempt(wrong="b"), attempt(exit_status=contract.STATUS_RANK_FAILED, steps=20)
    assert (("b",), 0.0) == ((one := plan_restart([first], most=3)).excluded, one.not_before)
    assert ("b",) == plan_restart([first, second], most=3).excluded
    lost = attempt(exit_status=contract.STATUS_HOST_LOST, steps=20, lost={"c": 5.0})
    assert ("b", "c") == plan_restart([first, lost], most=3).excluded


def test_an_elastic_run_goes_on_without_such_a_host_although_nobody_has_allowed_a_restart():
    first, second = attempt(wrong="b"), attempt(wrong="c", steps=20)
    assert ("b",) == plan_restart([first], most=0, is_elastic=True).excluded
    assert ("b", "c") == plan_restart([first, second], most=0, is_elastic=True).excluded
    assert GiveUp() == plan_restart([first], most=0)
    other = attempt(exit_status=contract.STATUS_RANK_FAILED, steps=20)
    assert GiveUp() == plan_restart([first, other], most=0, is_elastic=True)


def test_nothing_is_restarted_where_no_other_host_could_take_part():
    assert GiveUp() == plan_restart([attempt(comes_again=True, wrong="localhost")], most=3)


def test_marks_say_what_was_found(tmp_path):
    folder = tmp_path / "checkpoints/step-3"
    folder.mkdir(parents=True)
    audits = SimpleNamespace(disputed=SimpleNamespace(step=5), clean=None)
    mark_later_checkpoints(RunFolder("3fa1", tmp_path), audits)
    assert {"failed": 5, "clean": None, "run": "3fa1"} == json.loads((folder / "suspect.json").read_text())
    assert "and no audit before was clean" in verify(folder)
