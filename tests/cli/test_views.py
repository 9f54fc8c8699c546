"""How a run looks while it runs: plain lines, the table, and a real terminal that is given back as it was."""

import io
import json
import re
import subprocess
import sys
import time

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live

from tests.records.written import progress
from ttlaunch import contract
from ttlaunch.cli.live import PlainView, TableView
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.endings import RankExit
from ttlaunch.running.readers.follow import FollowedRun
from ttlaunch.running.runs.facts import MEMBERS_FILE, RunFacts
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import Phase, RankState, Watch, fold

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"


def ranks_of(*roles):
    return [RankState(RankRow(rank, "box", rank, role)) for rank, role in enumerate(roles)]


def plain_view():
    return PlainView(began=time.time(), reports_ready=True)


def steps(state, *, upto, total=4, counts="tokens"):
    """The records of a rank that steps once a second."""
    yield {"kind": "ready", "time": 0.0, "total_steps": total}
    for step in range(1, upto + 1):
        yield {"kind": "step", "time": float(step), "step": step, "loss": 4.0 / step, counts: 100}


def test_plain_lines_tell_of_validations_and_the_last_step(capsys):
    view, (worker, optimizer) = plain_view(), ranks_of("worker", "optimizer")
    records = [(optimizer, {"kind": "validation", "time": 0.5, "step": 0, "loss": 5.5})]
    records += [(state, record) for state in (worker, optimizer) for record in steps(state, upto=4)]
    records += [(optimizer, {"kind": "validation", "time": 5, "step": 4, "loss": 1.25, "perplexity": 3.4903})]
    norms = {"embedding": 0.25, "blocks.0": 1.5}
    records.append((optimizer, {"kind": "layer_grad_norms", "time": 5, "step": 4, "norms": norms}))
    for state, record in records:
        fold(state, progress(record))
        view.record(state, progress(record))
    assert {4: norms} == optimizer.layer_norms
    said = capsys.readouterr()
    assert said.out == (
        "rank 1 optimizer | step 0: validation loss 5.5000\n"
        "rank 1 optimizer | step 1/4 loss 4.0000\n"
        "rank 1 optimizer | step 4/4 loss 1.0000 1,000 ms/step 100 tokens/s\n"
        "rank 1 optimizer | step 4: validation loss 1.2500, perplexity 3.49\n"
        "rank 1 optimizer | step 4: gradient norms embedding 0.25, blocks.0 1.5\n"
    )
    assert said.err == ""


def test_a_line_of_a_step_has_that_steps_loss_when_several_came_at_once(capsys):
    view, (worker,) = plain_view(), ranks_of("worker")
    fresh = [*steps(worker, upto=4)]
    for record in fresh:
        fold(worker, progress(record))
    for record in fresh:
        view.record(worker, progress(record | {"grad_norm": 0.5}))
    lines = [line.split(" gradient norm")[0] for line in capsys.readouterr().out.splitlines()]
    assert ["rank 0 worker | step 1/4 loss 4.0000", "rank 0 worker | step 4/4 loss 1.0000"] == lines


def test_a_note_of_a_rank_is_a_line_in_both_views(capsys):
    (worker,) = ranks_of("worker")
    note = progress({"kind": "note", "time": 1.0, "text": "schedule gpipe is the quickest\n: 2 ms"})
    line = "rank 0 worker | schedule gpipe is the quickest\\n: 2 ms\n"
    plain_view().record(worker, note)
    assert line == capsys.readouterr().out
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    with Live(console=console, auto_refresh=False) as live:
        TableView(live, began=time.time(), reports_ready=True).record(worker, note)
    assert line.strip() == console.file.getvalue().strip()


def test_plain_lines_of_ranks_go_to_the_stream_they_came_from(capfd):
    view = plain_view()
    view.output("stdout", b"rank 0 worker | \xff bytes as they are")
    view.output("stderr", b"rank 0 worker | warning")
    said = capfd.readouterr()
    assert said.err == "rank 0 worker | warning\n"
    assert said.out.startswith("rank 0 worker | ")
    assert said.out.endswith(" bytes as they are\n")


def drawn(ranks, *, is_program=False, began=None, width=100, is_elastic=False):
    """The table for these states as text, with `T` for the times that have passed."""
    console = Console(file=io.StringIO(), width=width, height=40, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        view = TableView(live, began=began or time.time(), reports_ready=not is_program, is_elastic=is_elastic)
        console.print(view._draw(ranks))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    text = "\n".join(line for line in lines if line)
    return re.sub(r"\b(start-up|training|running) \d+ \w+( \d+ \w+)?", r"\1 T", text)


def test_the_time_left_of_a_resumed_run_counts_its_own_steps():
    """Steps 101 to 105 of 110, one a second: five seconds are left, not a fraction of one."""
    (rank,) = ranks_of("trainer")
    fold(rank, progress({"kind": "ready", "time": 0.0, "total_steps": 110}))
    for step in range(101, 106):
        fold(rank, progress({"kind": "step", "time": float(step), "step": step}))
    assert "5 s left" in drawn([rank])


def test_the_table_has_a_row_for_each_rank():
    ranks = ranks_of("worker", "aggregator", "optimizer", "spare")
    for record in steps(ranks[0], upto=3):
        fold(ranks[0], progress(record))
    for record in steps(ranks[2], upto=4):
        fold(ranks[2], progress(record))
    fold(ranks[2], progress({"kind": "done", "time": 9}))
    fold(ranks[2], progress({"kind": "validation", "time": 9, "step": 4, "loss": 1.5}))
    fold(ranks[1], progress({"kind": "started", "time": 0, "pid": 1}))
    ranks[3].phase = Phase.FAILED
    assert drawn(ranks) == (
        "rank   role         step     loss   ms/step   tokens/s   state\n"
        "   0   worker          3   1.3333     1,000        100   running\n"
        "   1   aggregator                                        starting\n"
        "   2   optimizer       4   1.0000     1,000        100   done\n"
        "   3   spare                                             failed\n"
        "━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  4/4  start-up T  validation loss 1.5000"
    )


def test_loss_step_time_speed_gradient_norm_and_connection_are_shown_by_rank(capsys):
    """D19, D20: all that the training guide wants to see in a console."""
    ranks = ranks_of("worker", "server")
    for record in steps(ranks[0], upto=3):
        fold(ranks[0], progress(record))
        known = {name: value for name, value in record.items() if name not in {"loss", "tokens"}}
        fold(ranks[1], progress(known | {"grad_norm": 0.12345}))
    ranks[1].connection = "silent"
    assert drawn(ranks).splitlines()[:3] == [
        "rank   role     step     loss   grad norm   ms/step   tokens/s   state",
        "   0   worker      3   1.3333                 1,000        100   running",
        "   1   server      3                0.123     1,000              host silent",
    ]
    view = plain_view()
    record = {"kind": "step", "time": 4.0, "step": 4, "loss": 1.0, "tokens": 100, "grad_norm": 2.0}
    fold(ranks[0], progress(record))
    view.record(ranks[0], progress(record))
    assert (
        "rank 0 worker | step 4/4 loss 1.0000 gradient norm 2 1,000 ms/step 100 tokens/s\n" == capsys.readouterr().out
    )


def test_the_speed_of_training_on_images_is_shown_in_samples(capsys):
    (worker,) = ranks_of("worker")
    view = plain_view()
    for record in steps(worker, upto=4, counts="samples"):
        fold(worker, progress(record))
        view.record(worker, progress(record))
    assert drawn([worker]).splitlines()[:2] == [
        "rank   role     step     loss   ms/step   samples/s   state",
        "   0   worker      4   1.0000     1,000         100   running",
    ]
    assert capsys.readouterr().out.endswith("step 4/4 loss 1.0000 1,000 ms/step 100 samples/s\n")


def test_a_host_that_does_not_answer_is_seen_at_its_ranks(tmp_path):
    """D19, D20: the connection state, from what the supervisor notes; it goes when the host answers again."""
    (tmp_path / "records").mkdir()
    rows = (RankRow(0, "near", 0, "worker"), RankRow(1, "far", 0, "worker"))
    folder = RunFolder("test", tmp_path)
    seen = []

    class View:
        def record(self, state, record):
            pass

        def output(self, stream, line):
            pass

        def tick(self, ranks):
            seen.append([state.condition(reports_ready=True) for state in ranks])

    run = FollowedRun(folder, RunFacts("r", "two", rows, is_recipe=True), View(), only=())
    for event in ("host_silent", "host_back", "host_lost"):
        append_event(folder, event, host="far")
        run.poll()
    assert [["waiting", "host silent"], ["waiting", "waiting"], ["waiting", "host lost"]] == seen


def test_the_table_of_a_run_without_steps_has_no_bar():
    assert drawn(ranks_of("rank")) == ("rank   role   state\n   0   rank   waiting\nstart-up T: starting the ranks")


def test_a_program_runs_as_soon_as_it_is_started():
    (rank,) = ranks_of("rank")
    fold(rank, progress({"kind": "started", "time": 0, "pid": 1}))
    assert drawn([rank], is_program=True).splitlines()[1].endswith("running")
    assert drawn([rank]).splitlines()[1].endswith("starting")


def test_ranks_that_were_told_to_end_are_stopping_until_they_have():
    told, ended, starting = ranks_of("worker", "worker", "worker")
    for rank in (told, ended):
        fold(rank, progress({"kind": "ready", "time": 0}))
        fold(rank, progress({"kind": "stopping", "time": 1, "step": 4}))
    fold(ended, progress({"kind": "done", "time": 2}))
    fold(starting, progress({"kind": "started", "time": 2, "pid": 1}))
    conditions = [line.split()[-1] for line in drawn([told, ended, starting]).splitlines()[1:4]]
    assert ["stopping", "done", "starting"] == conditions


def test_a_program_that_was_told_to_end_is_stopping(tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / contract.progress_file(0)).write_text(contract.record_line({"kind": "started", "time": 0, "pid": 1}))
    watch = Watch(
        RunFacts("work", "local", (RankRow(0, "box", 0, "rank"),), is_recipe=False), RunFolder("test", tmp_path)
    )
    watch.poll()
    assert "running" == watch.ranks[0].condition(reports_ready=False)
    (tmp_path / contract.ENDING_FILE).write_text('{"after_step": null}')
    watch.poll()
    assert "stopping" == watch.ranks[0].condition(reports_ready=False)


def test_the_table_tells_the_time_that_is_left():
    ranks = ranks_of("trainer")
    for record in steps(ranks[0], upto=3, total=10):
        fold(ranks[0], progress(record))
    assert drawn(ranks).splitlines()[-1].endswith(" 3/10  7 s left  start-up T, training T")


def test_no_time_is_left_of_a_run_that_was_ended_before_its_last_step():
    (rank,) = ranks_of("trainer")
    for record in steps(rank, upto=3, total=10):
        fold(rank, progress(record))
    rank.phase = Phase.STOPPED
    assert drawn([rank]).splitlines()[-1].endswith(" 3/10  start-up T, training T")


@pytest.mark.parametrize("width", [80, 200])
def test_lines_below_the_table_stay_narrow_so_that_a_smaller_window_breaks_none(width):
    ranks = ranks_of("trainer")
    for record in steps(ranks[0], upto=4):
        fold(ranks[0], progress(record))
    fold(ranks[0], progress({"kind": "validation", "time": 5.0, "step": 4, "loss": 1.5, "perplexity": 4.48}))
    *_, bar, validation = drawn(ranks, width=width).splitlines()
    assert "validation loss 1.5000, perplexity 4.48" == validation
    assert bar.startswith("━" * 30 + "  4/4  start-up T, training T")


def test_a_large_world_is_cut():
    lines = drawn(ranks_of(*["worker"] * 25)).splitlines()
    assert lines[24:26] == ["  23   worker   waiting", "… and 1 more rank"]


@pytest.mark.mpi
def test_a_terminal_shows_the_table_and_the_summary_and_is_restored(terminal):
    shown = terminal("run", "fabric_minimal", "-n", "2", "--set", "all_reduce_config.megabytes=0.1")
    assert shown.ends(within_s=90) == 0
    assert "rank   role   state" in shown.text
    assert re.search(r"\n   1   peer   done", shown.text)
    assert "\ndone: fabric_minimal (all) on local, 2 ranks, " in shown.text
    assert shown.shown.count(HIDE) >= 1
    assert shown.shown.rindex(SHOW) > shown.shown.rindex(HIDE)


@pytest.mark.mpi
def test_ctrl_c_on_a_terminal_ends_the_run_and_restores_it(terminal, here):
    (here / "work.py").write_text("import os, time\nprint('begun', os.getpid(), flush=True)\ntime.sleep(120)\n")
    shown = terminal("run", "work.py", "-n", "2")
    shown.read_until(lambda: shown.text.count("begun") >= 2, within_s=60)
    shown.type(b"\x03")
    assert shown.ends(within_s=10) == 130
    assert "\ninterrupted: work on local, 2 ranks, " in shown.text
    assert "Traceback" not in shown.text
    assert shown.shown.rindex(SHOW) > shown.shown.rindex(HIDE)


@pytest.mark.mpi
def test_a_failure_on_a_terminal_stands_below_the_table(terminal, here):
    (here / "work.py").write_text("raise SystemExit(3)\n")
    shown = terminal("run", "work.py")
    assert shown.ends(within_s=60) == 1
    table, _, failure = shown.text.partition("\nfailed: work on local, 1 rank, ")
    assert "failed" in table
    assert "error[R003]: rank 0 (rank, localhost) exited with status 3" in failure


@pytest.mark.mpi
def test_json_of_a_run_is_all_there_is_on_stdout(here):
    (here / "work.py").write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    command = [sys.executable, "-m", "ttlaunch", "run", "work.py", "-n", "2", "--format", "json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    report = json.loads(answer.stdout)
    assert (report["status"], report["world_size"], report["failure"]) == ("done", 2, None)
    assert ("ttlaunch.run/1", [], []) == (report.pop("schema"), report.pop("diagnostics"), report.pop("earlier"))
    [folder] = [path for path in (here / "runs").glob("[!.]*") if path.is_dir()]
    assert report == json.loads((folder / "report.json").read_text())


def started(rank, *, metrics=None, last=b"", **usage):
    """A rank of a script that runs, and has printed and used these."""
    fold(rank, progress({"kind": "started", "time": 0, "pid": 1}))
    fold(rank, progress({"kind": "printed", "time": 1, **(metrics or {"values": {}})}))
    fold(rank, progress({"kind": "usage", "time": 1, "cpu_percent": 0, "memory_bytes": 0, "count": 1, **usage}))
    rank.last_line = last


def test_the_table_of_a_script_shows_what_ranks_print_and_use():
    ranks = ranks_of("rank", "rank")
    numbers = {"step": 12, "values": {"loss": 0.531234, "lr": 1e-4}}
    started(ranks[0], metrics=numbers, last=b"epoch 1\tbegins", cpu_percent=97, memory_bytes=1_530_000_000)
    started(ranks[1], cpu_percent=203, memory_bytes=210_000_000, gpu_percent=88, gpu_memory_bytes=40_000_000_000)
    assert drawn(ranks, is_program=True, width=120).splitlines()[:3] == [
        "rank   role   step   metrics                   CPU     memory    GPU   GPU mem   state     last line",
        "   0   rank     12   loss=0.5312 lr=0.0001    97 %     1.5 GB                    running   epoch 1 begins",
        "   1   rank                                  203 %   210.0 MB   88 %   40.0 GB   running",
    ]
    assert "CPU" not in drawn(ranks)  # of a recipe


def test_no_line_of_a_rank_steers_the_terminal_or_makes_the_table_wider():
    (rank,) = ranks_of("rank")
    hostile = {f"\x1b[2Jname{number}\n" + "n" * 60: 10.0**300 for number in range(9)}
    started(
        rank,
        metrics={"values": hostile},
        last=b"\x1b]0;title\x07\x1b[2J\xe2\x80\xae" + "漢".encode() * 300,
        cpu_percent=2**53,
        memory_bytes=2**60,
    )
    for width in range(10, 200, 7):
        lines = drawn([rank], is_program=True, width=width).splitlines()
        assert "\x1b" not in "".join(lines)
        assert "\u202e" not in "".join(lines)
        assert "title" not in "".join(lines)
        assert all(cell_len(line) <= width for line in lines), width


def test_ranks_without_a_row_are_folded_into_ranges():
    ranks = ranks_of(*["rank"] * 40)
    for number, rank in enumerate(ranks):
        started(rank, metrics={"step": 100 + number, "values": {}}, cpu_percent=100, memory_bytes=1_000_000 * number)
    assert "… and 16 more ranks, step 124 to 139, CPU 100 %, memory 24.0 MB to 39.0 MB" in drawn(ranks, is_program=True)


def test_a_rank_that_has_ended_uses_nothing():
    (rank,) = ranks_of("rank")
    started(rank, cpu_percent=97, memory_bytes=1000)
    rank.exit = RankExit(time=2.0, status=0)
    assert "97 %" not in drawn([rank], is_program=True)


def test_numbers_sent_with_a_step_have_their_place_and_the_others_are_metrics():
    (rank,) = ranks_of("rank")
    fold(rank, progress({"kind": "step", "time": 1.0, "step": 3, "loss": 0.5, "samples": 8, "accuracy": 0.75}))
    started(rank, metrics={"step": 99, "values": {"best": 1}})
    heading, row, *_ = drawn([rank], is_program=True).splitlines()
    assert ["rank", "role", "step", "loss", "metrics"] == heading.split()[:5]
    assert ["0", "rank", "3", "0.5000", "accuracy=0.75", "best=1"] == row.split()[:6]


def test_a_host_cannot_fill_the_launchers_memory_with_names():
    (rank,) = ranks_of("rank")
    for number in range(1000):
        fold(rank, progress({"kind": "printed", "time": 1.0, "values": {f"n{number}": 1}}))
    assert 64 == len(rank.metrics)


@pytest.mark.mpi
def test_a_terminal_shows_the_last_line_the_metrics_and_the_use_of_two_ranks_of_a_script(terminal, here):
    text = "import os, time\nprint('step=7', 'loss=0.%s' % os.environ['RANK'], flush=True)\nblock = bytearray(90_000_000)\n"
    (here / "work.py").write_text(
        text + "while not os.path.exists('enough'):\n    pass\nprint('that was all', flush=True)\n"
    )
    shown = terminal("run", "work.py", "-n", "2", width=140)
    row = r"\n +{0} +rank +7 +loss={1} +[1-9]\d* % +[\d.]+ MB +running +step=7 loss=0\.{0}"
    shown.read_until(
        lambda: all(re.search(row.format(*pair), shown.text) for pair in ((0, "0"), (1, r"0\.1"))), within_s=120
    )
    attached = terminal("attach", width=140)
    attached.read_until(lambda: re.search(row.format(1, r"0\.1"), attached.text), within_s=60)
    (here / "enough").touch()
    assert 0 == shown.ends(within_s=60)
    assert re.search(r"\n +1 +rank +7 +loss=0.1 +done +that was all", shown.text)
    found = subprocess.run([sys.executable, "-m", "ttlaunch", "metrics"], capture_output=True, text=True, check=True)
    assert re.search(r"printed/loss +1 +rank +1 +0\.1 +0\.1", found.stdout)
    assert re.search(r"processes/memory_bytes +0 +rank", found.stdout)
    report = subprocess.run([sys.executable, "-m", "ttlaunch", "report"], capture_output=True, text=True, check=True)
    assert "    1 rank  step=7 loss=0.1" in report.stdout


def test_workers_that_come_and_go_have_names_their_ranks_of_the_epoch_and_those_that_joined(tmp_path):
    """Worker 0 ended, 1 and 4, which joined from another machine, are the members; 2 and 3 never started."""

    class View:
        ticks = ()

        def record(self, state, record):
            pass

        def output(self, stream, line):
            pass

        def tick(self, ranks):
            self.ticks = [*ranks]

    rows = tuple(RankRow(number, "box", number % 2, "worker", later=number > 1) for number in range(4))
    folder = RunFolder("run", tmp_path)
    (tmp_path / contract.RECORDS_DIR).mkdir()
    entries = [
        {"what": "epoch", "members": [0, 1]},
        {"what": "joined", "worker": 7, "host": "10.0.0.7"},  # not the next number
        {"what": "joined", "worker": 4, "host": "10.0.0.9", "name": "alice"},
        {"what": "epoch", "members": [1, 4]},
    ]
    (tmp_path / MEMBERS_FILE).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    records = [
        {"kind": "step", "time": 1.0, "step": 3, "loss": 2.5},
        {"kind": "usage", "time": 1.0, "cpu_percent": 90, "memory_bytes": 3_000_000, "count": 1},
    ]
    (tmp_path / contract.progress_file(4)).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    view = View()
    FollowedRun(folder, RunFacts("r", "lab", rows, is_recipe=True), view, only=()).poll()
    assert [None, 0, None, None, 1] == [state.place for state in view.ticks]
    table = drawn([state for state in view.ticks if state.phase is not Phase.ABSENT], is_elastic=True)
    cells = [line.split() for line in table.splitlines()[1:4]]
    assert [["worker-0000", "–"], ["worker-0001", "0"], ["worker-0004", "1"]] == [line[:2] for line in cells]
    assert ["10.0.0.9", "3", "2.5000", "3.0", "MB"] == cells[2][3:8]


def test_steps_of_an_elastic_run_are_told_by_another_worker_when_the_one_that_told_them_has_ended(capsys):
    view = PlainView(began=time.time(), reports_ready=True, is_elastic=True)
    first, second = ranks = ranks_of("worker", "worker")

    def report(state, step, **fields):
        record = progress({"kind": "step", "time": float(step), "step": step, **fields})
        view._last_line = 0.0  # as if the last line was long ago
        fold(state, record)
        view.record(state, record)

    validation = progress({"kind": "validation", "time": 0.5, "step": 0, "loss": 5.5})
    view.record(first, validation)
    report(first, 1, loss=4.0, tokens=8)
    report(second, 1, loss=4.0)
    first.exit = RankExit(rank=0, signal=9)
    view.tick(ranks)
    report(second, 2, loss=3.5)  # another member counts
    report(second, 3, loss=3.0, tokens=8)
    lines = capsys.readouterr().out.splitlines()
    assert ["worker-0000 | step 0", "worker-0000 | step 1", "worker-0001 | step 3"] == [
        re.match(r"worker-[0-9]+ \| step [0-9]", line)[0] for line in lines
    ]


def test_a_worker_that_comes_and_goes_is_named_in_lines(capsys):
    worker = RankState(RankRow(3, "box", 0, "worker", later=True))
    note = progress({"kind": "note", "time": 1.0, "text": "takes part"})
    PlainView(began=time.time(), reports_ready=True, is_elastic=True).record(worker, note)
    assert "worker-0003 | takes part\n" == capsys.readouterr().out
