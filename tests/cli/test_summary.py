"""How the first failure of a run is told: the diagnostic, from the report and nothing else."""

import signal

import pytest

from tests.records.written import progress
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.run_diagnostics import failure_diagnostic
from ttlaunch.cli.summary import print_result, show_summary
from ttlaunch.diagnostics import Format
from ttlaunch.diagnostics.render import render
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.endings import RankError, RankExit
from ttlaunch.running.failures.attribution import Witnesses, first_failure
from ttlaunch.running.failures.stderr_tail import parse_stderr_tail
from ttlaunch.running.report import Report
from ttlaunch.running.runs.facts import RunFacts
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import RankState, fold, steps_done

LAST = "recv of 13.2 MB from rank 0 (worker), gradients, tag 3, step 8, begun 0.4 s before the end, at trainer.py:41"
KILLED = {"time": 1.0, "signal": signal.SIGKILL, "status": None, "oom_kills": 0}
ENDED = {"time": 1.2, "signal": signal.SIGTERM, "status": None}


@pytest.fixture
def told(here):
    """`told(exits, log)` is what is said of a run whose ranks ended so."""

    def tell(exits, *, log="", last=None, steps=7, error=None):
        ranks = [
            RankState(
                RankRow(rank, "box", rank, "worker"),
                step=steps,
                exit=ending and RankExit(**ending),
                error=error and RankError(**error),
            )
            for rank, ending in exits.items()
        ]
        words = Witnesses(stderr_tail=lambda _: parse_stderr_tail(log))
        failure = first_failure(ranks, lost_shims={}, stopped=False, witnesses=words)
        rows = tuple({"rank": rank, "last_operation": last and {"text": last}} for rank in exits)
        known = dict.fromkeys(Report.__dataclass_fields__)
        report = Report(**{**known, "failure": failure, "ranks": rows})
        return render([failure_diagnostic(report, RunFolder("tonight", here / "runs/tonight"))]).rstrip()

    return tell


def test_a_killed_rank_is_told_with_its_last_operation_its_last_words_and_what_followed(told):
    text = told({0: ENDED, 1: KILLED, 2: ENDED}, log="warming up\nstep 7 done\n", last=LAST)
    assert (
        text
        == f"""\
error[R004]: rank 1 (worker, box) was killed by SIGKILL in step 8
 = note: not by the kernel: it counted no kill for want of memory
 = note: its last operation: {LAST}
 = note: its last lines on stderr:
 = note:   warming up
 = note:   step 7 done
 = note: the first rank to fail; then rank 0 and 2 were ended with the run

hint: find out who sent it: a person, a batch system at its limit, a watchdog; `ttlaunch run RECIPE --resume latest` continues from the newest checkpoint

hint: full log: runs/tonight/logs/rank-1.stderr"""
    )


def test_a_rank_without_peers_and_words_is_told_in_two_lines(told):
    text = told({0: {"time": 1.0, "status": 3}}, steps=0)
    assert text == (
        "error[R003]: rank 0 (worker, box) exited with status 3\n\nhint: full log: runs/tonight/logs/rank-0.stderr"
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("CheckpointWriteError", "R030]: rank 0 (worker, box) could not keep a checkpoint: step 16: no space left"),
        ("CheckpointReadError", "R031]: rank 0 (worker, box) could not begin: step 16: no space left"),
    ],
)
def test_a_checkpoint_that_failed_is_not_told_twice(here, kind, message):
    state = RankState(
        RankRow(0, "box", 0, "worker"), error=RankError(type=kind, message="step 16: no space left", time=1.0)
    )
    words = Witnesses(stderr_tail=lambda _: parse_stderr_tail("error: step 16: no space left\n"))
    failure = first_failure([state], lost_shims={}, stopped=False, witnesses=words)
    report = Report(**{**dict.fromkeys(Report.__dataclass_fields__), "failure": failure, "ranks": ({"rank": 0},)})
    text = render([failure_diagnostic(report, RunFolder("tonight", here / "runs/tonight"))])
    assert f"error[{message}\n\nhint: full log: runs/tonight/logs/rank-0.stderr" == text.rstrip()


def test_a_line_of_a_hosts_copy_of_the_code_is_shown_from_here(told, here):
    (here / "mine").mkdir()
    (here / "mine/trainer.py").write_text("def worker():\n    raise ValueError\n")
    error = {"type": "ValueError", "message": "bucket 7", "time": 1.0, "line": 2, "step": 8}
    error["file"] = f"/home/me/.ttlaunch/releases/{'a1' * 32}/project/mine/trainer.py"
    text = told({0: None}, error=error)
    assert " --> mine/trainer.py:2:5\n  |\n2 |     raise ValueError\n" in text


def test_steps_are_updates_and_not_data_that_was_handed_out():
    """A worker of an asynchronous server has the data of step 9 while 7 gradients have been applied."""
    worker, server = (RankState(RankRow(rank, "box", rank, role)) for rank, role in enumerate(("worker", "server")))
    fold(worker, progress({"kind": "step", "time": 1.0, "step": 9, "loss": 1.0, "tokens": 8}))
    assert 9 == steps_done([worker, server])
    fold(server, progress({"kind": "step", "time": 1.0, "step": 7, "loss": 1.0, "tokens": 8, "grad_norm": 0.5}))
    assert 7 == steps_done([worker, server])


@pytest.mark.parametrize(("is_serving", "work"), [(True, "serving"), (False, "training")])
def test_a_run_that_serves_has_trained_for_no_time(here, capsys, is_serving, work):
    known = dict.fromkeys(Report.__dataclass_fields__)
    known |= {
        "name": "mine",
        "status": "done",
        "world_size": 1,
        "duration_s": 2.0,
        "startup_s": 0.5,
        "ranks": (),
        "results": {},
    }
    facts = RunFacts("mine", "local", (), is_recipe=True, is_serving=is_serving)
    show_summary(Report(**known), facts, RunFolder("a", here / "runs/a"))
    assert f"  time             0.5 s start-up, 1.5 s {work}" in capsys.readouterr().out.splitlines()


def test_results_of_long_names_stand_in_one_column_and_one_validation_is_not_two(here, capsys):
    known = dict.fromkeys(Report.__dataclass_fields__)
    known |= {"name": "mine", "status": "done", "world_size": 1, "duration_s": 2.0, "steps": 3, "ranks": ()}
    known |= {
        "startup_s": 0.5,
        "first_validation": 5.5,
        "last_validation": 5.5,
        "results": {"staleness average": 1.5, "stale": "2 of 9"},
    }
    show_summary(Report(**known), RunFacts("mine", "local", (), is_recipe=True), RunFolder("a", here / "runs/a"))
    assert capsys.readouterr().out.splitlines() == [
        "done: mine on local, 1 rank, 2.0 s",
        "  time             0.5 s start-up, 1.5 s training",
        "  steps            3",
        "  validation loss  5.5000",
        "  staleness average 1.5",
        "  stale             2 of 9",
        "  run folder       runs/a",
    ]


def test_a_good_run_ends_with_the_commands_that_read_it_next(trained, here, capsys):
    known = {**dict.fromkeys(Report.__dataclass_fields__), "name": "mine", "world_size": 1, "duration_s": 1666.0}
    known |= {
        "ranks": (),
        "results": {},
        "lost_checkpoints": {},
        "lost_hosts": {},
        "epochs": (),
        "loss_spikes": (),
        "exit_status": 0,
        "status": "done",
    }

    def last_lines(name, *, status="done", is_recipe=True, loss=None):
        facts, folder = RunFacts("mine", "local", (), is_recipe=is_recipe), RunFolder(name, here / "runs" / name)
        print_result(
            Outcome(
                Report(**{**known, "status": status, "first_validation": loss, "last_validation": loss}), facts, folder
            ),
            form=Format.FULL,
        )
        lines = capsys.readouterr().out.splitlines()
        return lines[0], lines[lines.index(f"  run folder       runs/{name}") + 1 :]

    trained("one-3fa1", 8)
    first, following = last_lines("one-3fa1")
    assert "done: mine on local, 1 rank, 27 min 46 s" == first
    assert following == [
        "  next             ttlaunch report 3fa1",
        "                   ttlaunch weights export 3fa1 weights.safetensors",
    ]
    trained("two-3fa1")
    assert ["  next             ttlaunch report runs/two-3fa1"] == last_lines("two-3fa1")[1]
    assert ["  next             ttlaunch logs runs/two-3fa1"] == last_lines("two-3fa1", is_recipe=False)[1]
    plotted = [
        "  next             ttlaunch report runs/two-3fa1",
        "                   ttlaunch report runs/two-3fa1 --plot",
    ]
    assert plotted == last_lines("two-3fa1", loss=2.0)[1]
    assert [] == last_lines("one-3fa1", status="interrupted")[1]
