"""What different terminals show of a run: dumb ones, those of CI systems, narrow ones, and while Ctrl-C is pressed."""

import re
import sys
import time
from datetime import UTC, datetime

import pytest

from tests.forked import FORKED
from tests.records.written import progress
from ttlaunch import contract
from ttlaunch.cli.live import TableView, _engine_start, make_view, slow_start
from ttlaunch.cli.live_cells import fitting_columns
from ttlaunch.contract import START_STAGES
from ttlaunch.diagnostics import render_duration
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.endings import RankExit
from ttlaunch.running.runs.facts import RunFacts
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import RankState, fold

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
STYLE = re.compile(rb"\x1b\[[0-9;]*m")


def states(*hosts):
    return [RankState(RankRow(rank, host, 0, "worker")) for rank, host in enumerate(hosts)]


def begin(state, stage=None, *, time=10.0):
    fold(state, progress({"kind": "started", "time": time, "pid": 1}))
    if stage:
        fold(state, progress({"kind": "starting", "time": time, "stage": stage}))


@pytest.mark.mpi
@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"CI": "true"}], ids=["dumb", "ci"])
def test_a_terminal_that_cannot_redraw_shows_plain_lines_while_the_run_goes(terminal, here, environment):
    (here / "work.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(120)\n")
    shown = terminal("run", "work.py", **environment)
    shown.read_until(lambda: "rank 0 rank | begun" in shown.text, within_s=60)
    assert shown.process.poll() is None
    shown.type(b"\x03")
    assert 130 == shown.ends(within_s=20)
    assert b"\x1b[2K" not in shown.shown
    assert "rank   role" not in shown.text


@pytest.mark.mpi
def test_no_color_leaves_a_table_that_is_redrawn_without_any_style(terminal, here):
    (here / "work.py").write_text("print('\\x1b[31mred\\x1b[0m', flush=True)\nraise SystemExit(3)\n")
    shown = terminal("run", "work.py", NO_COLOR="1")
    assert 1 == shown.ends(within_s=60)
    assert b"\x1b[2K" in shown.shown
    assert [] == STYLE.findall(shown.shown)


def test_no_color_holds_for_help_and_explain(terminal):
    for command in (["--help"], ["run", "--help"], ["explain", "R002"]):
        shown = terminal(*command, NO_COLOR="1")
        assert 0 == shown.ends(within_s=30)
        assert [] == STYLE.findall(shown.shown)


@pytest.mark.mpi
def test_ctrl_c_at_80_columns_leaves_one_whole_table_and_the_runs_id_above_it(terminal):
    shown = terminal("run", "hierarchical_parallel", *FORKED, "--set", "training_config.steps=5000", width=80)
    shown.read_until(lambda: re.search(r" [1-9][0-9]*/5000", shown.text), within_s=120)
    shown.type(b"\x03\n")  # the line break would scroll a table whose terminal echoes it
    assert 130 == shown.ends(within_s=60)
    lines = shown.screen
    [heading] = [line for line in lines if "grad norm" in line or line.strip() in {"grad", "norm"}]
    assert heading.startswith("rank   role         step     loss   grad norm   ms/step   tokens/s   state")
    assert not [line for line in lines if "…" in line]
    assert re.fullmatch(r"run [\w-]+: hierarchical_parallel on local, 4 ranks", lines[0])
    assert [] == [line for line in lines if "^C" in line]


@pytest.mark.mpi
def test_a_terminal_echoes_again_after_the_run(terminal, here):
    (here / "work.py").write_text("pass\n")
    shown = terminal("run", "work.py")
    assert 0 == shown.ends(within_s=60)
    shown.type(b"typed")
    shown.read_until(lambda: shown.text.endswith("typed"), within_s=5)


@pytest.mark.mpi
def test_ctrl_z_gives_the_shell_a_terminal_that_echoes_and_shows_its_cursor(terminal, here):
    (here / "work.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(120)\n")
    shown = terminal(command=("sh", "-i"), PS1="$ ", ENV="")
    shown.type(f"{sys.executable} -m ttlaunch run work.py\n".encode())
    shown.read_until(lambda: "rank 0 rank | begun" in shown.text, within_s=60)
    assert shown.shown.rindex(HIDE) > shown.shown.rfind(SHOW)
    shown.type(b"\x1a")
    shown.read_until(lambda: "Stopped" in shown.text, within_s=20)
    assert shown.shown.rindex(SHOW) > shown.shown.rindex(HIDE)
    at = len(shown.shown)
    shown.type(b"typed=1\n")
    shown.read_until(lambda: b"typed=1" in shown.shown[at:], within_s=5)
    shown.type(b"fg\n")
    shown.read_until(lambda: HIDE in shown.shown[at:], within_s=20)
    shown.type(b"\x03")
    shown.read_until(lambda: "interrupted: work on local" in shown.text, within_s=20)
    shown.type(b"exit\n")
    shown.ends(within_s=20)


@pytest.mark.mpi
def test_attach_counts_from_the_start_of_the_run(terminal, here):
    (here / "work.py").write_text("import time\ntime.sleep(4)\n")
    assert 0 == terminal("run", "work.py").ends(within_s=60)
    shown = terminal("attach")
    assert 0 == shown.ends(within_s=60)
    times = re.findall(r"start-up \d+ s, running (\d+) s", shown.text)
    assert times
    assert all(4 <= int(time) < 20 for time in times)


def test_the_views_count_from_the_time_in_the_runs_id(capsys, tmp_path):
    facts = RunFacts("mine", "local", (RankRow(0, "a", 0, "worker"),), is_recipe=True)
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime(time.time() - 1666))
    ranks = states("a")
    with make_view(facts, RunFolder(f"{stamp}-3fa1", tmp_path)) as view:
        view.tick(ranks)
        begin(ranks[0])
        view.tick(ranks)  # the next line comes some seconds later
    assert re.fullmatch(
        rf"run {stamp}-3fa1: mine on local, 1 rank\nstart-up, 27 min 4[67] s: starting the ranks\n",
        capsys.readouterr().out,
    )


def test_a_run_in_a_renamed_folder_counts_from_its_first_event(capsys, tmp_path):
    facts, folder = (
        RunFacts("mine", "local", (RankRow(0, "a", 0, "worker"),), is_recipe=True),
        RunFolder("old", tmp_path),
    )
    stamp = datetime.fromtimestamp(time.time() - 3 * 3600 - 2, UTC).isoformat()
    (tmp_path / contract.EVENTS_FILE).write_text(f'{{"time": "{stamp}", "event": "start"}}\n')
    with make_view(facts, folder) as view:
        view.tick(states("a"))
    assert "start-up, 3 h: starting the ranks\n" in capsys.readouterr().out


def test_start_up_and_training_are_two_times():
    ranks = states("a", "b")
    for state, ready in zip(ranks, (14.0, 22.0), strict=True):
        begin(state)
        fold(state, progress({"kind": "ready", "time": ready, "total_steps": 4}))
        state.exit = RankExit(time=1688.0, status=0)
    view = TableView(None, began=2.0, reports_ready=True)
    assert "start-up 20 s, training 27 min 46 s" == view._times(ranks)
    assert "start-up 8 s, running 27 min 58 s" == TableView(None, began=2.0, reports_ready=False)._times(ranks)


def test_the_table_and_the_summary_count_from_the_same_start(tmp_path):
    (rank,) = ranks = states("a")
    begin(rank)
    fold(rank, progress({"kind": "ready", "time": 14.0, "total_steps": 4}))
    rank.exit = RankExit(time=20.0, status=0)
    view = TableView(None, began=2.0, reports_ready=True, engine_start=_engine_start(RunFolder("run", tmp_path)))
    assert "start-up 12 s, training 6 s" == view._times(ranks)
    stamp = datetime.fromtimestamp(5.0, UTC).isoformat()
    (tmp_path / contract.EVENTS_FILE).write_text(f'{{"time": "{stamp}", "event": "start"}}\n')
    assert "start-up 9 s, training 6 s" == view._times(ranks)


def test_a_slow_start_names_the_ranks_that_are_least_far():
    ranks = states("a", "a", "b", "b")
    assert "starting the ranks" == slow_start(ranks, reports_ready=True)
    begin(ranks[0])
    begin(ranks[1])
    assert "waiting for host b" == slow_start(ranks, reports_ready=True)
    begin(ranks[2], START_STAGES[0])
    begin(ranks[3], START_STAGES[2])
    assert "starting Python (rank 0-1 on a)" == slow_start(ranks, reports_ready=True)
    for rank in (0, 1, 2):
        begin(ranks[rank], "importing torch")
    assert "importing torch (rank 0-3)" == slow_start(ranks, reports_ready=True)
    for rank in (0, 1, 3):
        fold(ranks[rank], progress({"kind": "ready", "time": 12.0}))
    assert "importing torch (rank 2 on b)" == slow_start(ranks, reports_ready=True)
    fold(ranks[2], progress({"kind": "ready", "time": 12.0}))
    assert "" == slow_start(ranks, reports_ready=True)
    for state in ranks:
        state.started = None  # the record of its shim has not come yet
    assert "" == slow_start(ranks, reports_ready=False)


def test_a_program_is_up_as_soon_as_all_its_ranks_are_started():
    ranks = states("a", "a")
    assert "starting the ranks" == slow_start(ranks, reports_ready=False)
    begin(ranks[0])
    begin(ranks[1])
    assert "" == slow_start(ranks, reports_ready=False)


ROW = {
    "rank": "0",
    "role": "aggregator",
    "host": "metal-04.lab.example",
    "step": "346",
    "loss": "2.2087",
    "grad norm": "0.406",
    "ms/step": "22",
    "tokens/s": "22,842",
    "samples/s": "",
    "state": "running",
}


@pytest.mark.parametrize(
    ("width", "without", "apart"),
    [
        (110, set(), 3),
        (95, set(), 2),
        (85, set(), 1),
        (80, {"grad norm"}, 1),
        (70, {"grad norm", "ms/step"}, 1),
        (60, {"grad norm", "ms/step", "host"}, 1),
        (10, {"grad norm", "ms/step", "host", "tokens/s", "loss"}, 1),
    ],
)
def test_a_narrow_terminal_moves_columns_together_and_then_leaves_some_out(width, without, apart):
    columns, cells = fitting_columns([ROW, ROW | {"host": "b"}], width=width)
    assert (without, apart) == (ROW.keys() - {"samples/s", *columns}, cells)


def test_columns_that_say_nothing_go_first():
    script = ROW | dict.fromkeys(("step", "loss", "grad norm", "ms/step", "tokens/s"), "")
    assert (["rank", "role", "host", "state"], 3) == fitting_columns([script, script | {"host": "b"}], width=80)
    assert (["rank", "role", "state"], 3) == fitting_columns([script, script], width=80)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min"), (1666, "27 min 46 s"), (11100, "3 h 5 min"), (187200, "2 d 4 h"), (3600, "1 h")],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert text == render_duration(seconds)
