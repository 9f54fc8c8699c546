"""How the first failure of a run is told: the diagnostic, from the report and nothing else."""

import signal

import pytest

from ttlaunch.cli.summary import failure_diagnostic
from ttlaunch.diagnostics.render import render
from ttlaunch.launch.failures.attribution import Witnesses, first_failure
from ttlaunch.launch.failures.last_words import parse_last_words
from ttlaunch.launch.report import Report
from ttlaunch.launch.runs.run_folder import RunFolder
from ttlaunch.launch.watch import RankState
from ttlaunch.plan.launch_plan import RankRow

LAST = "recv of 13.2 MB from rank 0 (worker), gradients, tag 3, step 8, begun 0.4 s before the end, at trainer.py:41"
KILLED = {"time": 1.0, "signal": signal.SIGKILL, "status": None, "oom_kills": 0}
ENDED = {"time": 1.2, "signal": signal.SIGTERM, "status": None}


@pytest.fixture
def told(here):
    """`told(exits, log)` is what is said of a run whose ranks ended so."""

    def tell(exits, *, log="", last=None, steps=7, error=None):
        ranks = [
            RankState(RankRow(rank, "box", rank, "worker"), step=steps, exit=ending, error=error)
            for rank, ending in exits.items()
        ]
        words = Witnesses(last_words=lambda _: parse_last_words(log))
        failure = first_failure(ranks, lost_shims={}, ordered=False, witnesses=words)
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
 = note: its last words:
 = note:   warming up
 = note:   step 7 done
 = note: the first rank to fail; then rank 0 and 2 were ended with the run

hint: find out who sent it: a person, a batch system at its limit, a watchdog; `ttlaunch run RECIPE --resume latest` goes on from the newest checkpoint

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
        RankRow(0, "box", 0, "worker"), error={"type": kind, "message": "step 16: no space left", "time": 1.0}
    )
    words = Witnesses(last_words=lambda _: parse_last_words("error: step 16: no space left\n"))
    failure = first_failure([state], lost_shims={}, ordered=False, witnesses=words)
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
