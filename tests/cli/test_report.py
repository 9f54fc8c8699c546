"""`ttlaunch report`: the telemetry of a run as tables, and what to say of runs that have none."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from ttlaunch import contract
from ttlaunch.running.runs.registry import find_registry

FORMULA = """\
from ttlaunch.recipe import ConfigFile, Layout, Ranks, Recipe, Traffic


class Config(ConfigFile):
    pass


def traffic(config, ranks):
    server = ranks.sole("server")
    return [
        Traffic("gradients", 0, server, per_step=ranks.weight_bytes(0)),
        Traffic("weights", server, 0, per_step=ranks.weight_bytes(0), once=ranks.weight_bytes(0)),
        Traffic("losses", 0, server, per_validation=8),
    ]


RECIPE = Recipe("A test.", Config, [Layout("two", worker=1, server=1)], uses_data=False, traffic=traffic)
"""
STEPS = range(1, 11)


def spent(**times):
    return [[phase, {str(step): microseconds for step in STEPS}] for phase, microseconds in times.items()]


def telemetry(sent, *, last=10, waited=(), times=(), values=25):
    return {
        "format": contract.TRAFFIC_FORMAT,
        "first": 0,
        "last": last,
        "facts": {"values": values, "tensors": 2, "validation_micro_batches": 4},
        "sent": sent,
        "waited": [[name, phase, {str(step): us for step in STEPS}] for name, phase, us in waited],
        "spent": list(times),
    }


WORKER = telemetry(
    [
        ["gradients", None, "backward", 1, [[1, 10, 1, 2, 100]]],
        ["losses", None, "start", 1, [[0, 0, 1, 1, 8]]],
        ["losses", None, "after", 1, [[10, 10, 1, 1, 8]]],
    ],
    waited=[("weights", "exchange", 1500), ("losses", "after", 9000)],
    times=spent(step=6000, forward=1000, backward=3000, exchange=2000, after=9100),
)
SERVER = telemetry(
    [["weights", None, "start", 0, [[0, 0, 1, 1, 100]]], ["weights", None, "exchange", 0, [[1, 10, 1, 1, 100]]]],
    waited=[("gradients", "exchange", 4500)],
    times=spent(step=6000, update=500, exchange=5500),
)


@pytest.fixture
def make_run(here):
    """`make_run(name, …)`: the folder of a run of a recipe with a worker and a server, as the launcher leaves it."""

    def make(
        name,
        ledgers=(WORKER, SERVER),
        *,
        formula=FORMULA,
        status="done",
        failure=None,
        steps=10,
        program=False,
        last=None,
        counts="tokens",
    ):
        recipe = here / "recipes" / f"r{len(list(here.glob('recipes/*')))}"
        recipe.mkdir(parents=True)
        (recipe / "recipe.py").write_text(formula)
        run = here / "runs" / name
        (run / contract.RECORDS_DIR).mkdir(parents=True)
        rows = [
            {"rank": rank, "host": "box", "slot": rank, "role": role} for rank, role in enumerate(["worker", "server"])
        ]
        known = {"recipe": None, "command": {"name": "prog"}, "layout": None} if program else {}
        plan = {"recipe": {"name": "two", "folder": str(recipe)}, "layout": "two", "config": {}, "ranks": rows, **known}
        (run / contract.PLAN_FILE).write_text(json.dumps(plan | {"hash": "h"}))
        find_registry(os.environ).enter(
            run.resolve(), name="two", plan_hash="h", ranks=2
        )  # else its recipe is not asked
        for rank in range(2):
            records = [{"kind": "step", "time": 100.0 + step, "step": step, counts: 50} for step in range(1, steps + 1)]
            validated = [{"kind": "validation", "time": 99.0, "step": step, "loss": 2.0} for step in (0, 10)]
            lines = [json.dumps(record) + "\n" for record in records + (validated if rank else [])]
            (run / contract.progress_file(rank)).write_text("".join(lines))
            if rank < len(ledgers):
                (run / contract.traffic_file(rank)).write_text(json.dumps(ledgers[rank]) + "\n")
        if status is not None:
            ended = [{**row, "last_operation": last and last.get(row["rank"])} for row in rows]
            report = {"status": status, "failure": failure, "ranks": ended}
            (run / contract.REPORT_FILE).write_text(json.dumps(report))
        return run

    return make


def test_bytes_are_shown_against_the_formula_and_times_by_role(ttlaunch, make_run, golden):
    make_run("2026-01-01T00-00-00-aaaa")
    answer = ttlaunch("report")
    assert (0, "") == (answer.status, answer.stderr)
    golden("report.txt", answer.stdout)


@pytest.mark.parametrize("status", ["failed", "hung", "done", "interrupted"])
def test_what_ranks_did_last_is_shown_where_something_broke(ttlaunch, make_run, status):
    text = (
        "recv of 100 bytes from rank 1 (server), weights, tag 3, step 4, begun 9.1 s before the end, at trainer.py:41"
    )
    make_run("a", status=status, last={0: {"text": text}})
    lines = ttlaunch("report").stdout.splitlines()
    is_broken = status in {"failed", "hung"}
    assert is_broken == (f"    0 worker  {text}" in lines)
    assert is_broken == (f"last\t0 worker\t{text}" in ttlaunch("report --format concise").stdout.splitlines())
    assert not [line for line in lines if line.startswith("    1 server")]
    ranks = json.loads(ttlaunch("report --format json").stdout)["ranks"]
    assert [{"text": text}, None] == [rank["last_operation"] for rank in ranks]


def test_the_newest_run_is_taken_and_others_are_found_by_id_and_by_path(ttlaunch, make_run):
    for name in ("2026-01-02T00-00-00-bbbb", "2026-01-01T00-00-00-aaaa"):
        make_run(name)
    found = [
        json.loads(ttlaunch(f"report {words} --format json").stdout)["run_id"]
        for words in ("", "latest", "2026-01-01T00-00-00-aaaa", "runs/2026-01-01T00-00-00-aaaa")
    ]
    assert ["2026-01-02T00-00-00-bbbb"] * 2 + ["2026-01-01T00-00-00-aaaa"] * 2 == found


def test_the_speed_of_training_on_images_is_in_samples(ttlaunch, make_run):
    make_run("a", counts="samples")
    assert "  speed       50 samples/s" in ttlaunch("report").stdout.splitlines()
    report = json.loads(ttlaunch("report --format json").stdout)
    assert (None, 50.0) == (report["tokens_per_s"], report["samples_per_s"])


def test_a_program_gets_numbers_by_rank(ttlaunch, make_run):
    make_run("a")
    report = json.loads(ttlaunch("report --format json").stdout)
    assert (10, 50.0, "done", []) == tuple(report[key] for key in ("steps", "tokens_per_s", "status", "diagnostics"))
    weights = next(edge for edge in report["traffic"]["edges"] if edge["operation"] == "weights")
    expected = {
        "source": 1,
        "dest": 0,
        "messages": 11,
        "bytes": 1100,
        "formula_bytes": 1100,
        "slack_bytes": 0,
        "late_bytes": 0,
        "ratio": 1.0,
    }
    assert expected | {"operation": "weights"} == weights
    worker = report["times"][0]
    assert ([0], 0.006) == (worker["ranks"], worker["step"]["median_s"])
    assert [{"name": "weights", "median_s": 0.0015, "p90_s": 0.0015, "share": 0.25}] == worker["exposed"]


def test_concise_is_a_line_for_each_edge_and_each_time(ttlaunch, make_run):
    make_run("a")
    rows = [line.split("\t") for line in ttlaunch("report --format concise").stdout.splitlines()]
    edges, times = ([row[1:] for row in rows if row[0] == kind] for kind in ("edge", "time"))
    assert len(rows) == len(edges) + len(times)
    assert ["gradients", "0 worker", "1 server", "20", "1000", "1000"] in edges
    assert ["weights", "1 server", "0 worker", "11", "1100", "1100"] in edges
    assert ["worker", "whole step", "6.00", "6.00", "100.0%"] == times[0]
    assert ["worker", "exposed: weights", "1.50", "1.50", "25.0%"] in times
    assert {"worker", "server"} == {role for role, *_ in times}


def test_github_has_tables_and_an_annotation_for_each_warning(ttlaunch, make_run):
    twice = WORKER | {"sent": [["gradients", None, "backward", 1, [[1, 10, 1, 2, 200]]], *WORKER["sent"][1:]]}
    make_run("a", [twice, SERVER])
    answer = ttlaunch("report --format github")
    assert ttlaunch("report").stdout == answer.stdout
    assert (1, True) == (answer.stderr.count("\n"), answer.stderr.startswith("::warning "))
    assert "R045" in answer.stderr


def test_other_bytes_than_the_formulas_are_a_warning_that_names_operation_and_edge(ttlaunch, make_run):
    twice = WORKER | {"sent": [["gradients", None, "backward", 1, [[1, 10, 1, 2, 200]]], *WORKER["sent"][1:]]}
    make_run("a", [twice, SERVER])
    answer = ttlaunch("report")
    assert 0 == answer.status
    first, second, *_ = answer.stderr.splitlines()
    expected = "`gradients` moved 2,000 bytes from rank 0 (worker) to rank 1 (server), and the formula says 1,000"
    assert (f"warning[R045]: {expected}", " = note: in 10 steps and 2 validations") == (first, second)
    assert "2.000 !" in answer.stdout


def test_half_a_percent_counts_as_headers_and_more_does_not(ttlaunch, make_run):
    def sent(size):
        row = ["gradients", None, "backward", 1, [[1, 10, 1, 2, size]]]
        return WORKER | {"sent": [row, *WORKER["sent"][1:]], "facts": WORKER["facts"] | {"values": 2500}}

    big = SERVER | {"sent": [[*row[:4], [[*part[:4], 10_000] for part in row[4]]] for row in SERVER["sent"]]}
    for name, size in (("a", 10_050), ("b", 10_051), ("c", 9_950), ("d", 9_949)):
        make_run(name, [sent(size), big])
    assert [False, True, False, True] == ["R045" in ttlaunch(f"report {name}").stderr for name in "abcd"]


def test_an_operation_that_the_formula_does_not_name_is_a_difference(ttlaunch, make_run):
    more = WORKER | {"sent": [*WORKER["sent"], ["norms", None, "exchange", 1, [[1, 10, 1, 1, 8]]]]}
    make_run("a", [more, SERVER])
    answer = ttlaunch("report")
    assert "`norms` moved 80 bytes from rank 0 (worker) to rank 1 (server), and the formula says 0" in answer.stderr
    assert "not in it" in answer.stdout


def test_a_formula_that_raises_is_told_as_the_recipes_mistake(ttlaunch, make_run):
    make_run("a", formula=FORMULA.replace('ranks.sole("server")', 'ranks.sole("boss")'))
    answer = ttlaunch("report")
    assert 0 == answer.status
    assert "warning[R046]: the bytes of this run were compared with nothing: the formula of two needs" in answer.stderr
    make_run("b", formula=FORMULA.replace('ranks.sole("server")', "1 / 0"))
    assert "the formula of two raises ZeroDivisionError: division by zero" in ttlaunch("report b").stderr


def test_a_recipe_that_is_gone_is_no_mistake_of_its_formula(ttlaunch, make_run):
    folder = make_run("a")
    shutil.rmtree(json.loads((folder / "plan.json").read_text())["recipe"]["folder"])
    answer = ttlaunch("report")
    assert (0, "") == (answer.status, answer.stderr)
    assert "is no longer there" in answer.stdout


def test_a_recipe_without_a_formula_still_shows_its_bytes(ttlaunch, make_run):
    make_run("a", formula=FORMULA.replace(", traffic=traffic", ""))
    answer = ttlaunch("report")
    assert (0, "", True) == (answer.status, answer.stderr, "not compared: two declares no `traffic`" in answer.stdout)
    assert "gradients" in answer.stdout


def test_a_run_that_failed_is_compared_over_the_steps_that_all_ranks_finished(ttlaunch, make_run):
    failure = {"code": "R002", "rank": 1, "role": "server", "host": "box", "step": 8, "cause": "raised ValueError"}
    make_run("a", status="failed", failure=failure, steps=7)
    answer = ttlaunch("report")
    assert "" == answer.stderr
    assert "ended by    R002: rank 1 (server, box) raised ValueError in step 8" in answer.stdout
    assert "sent in 6 steps and 1 validation " in answer.stdout


def test_a_run_that_failed_in_its_second_step_is_not_accused_of_what_had_no_time_to_be_sent(ttlaunch, make_run):
    formula = FORMULA.replace('Traffic("losses"', 'Traffic("size", 1, 0, in_first_step=16), Traffic("losses"')
    make_run("a", status="failed", failure=None, steps=1, formula=formula)
    assert "" == ttlaunch("report a").stderr
    make_run("b", formula=formula)
    assert "`size` moved 0 bytes from rank 1 (server) to rank 0 (worker), and the formula says 16" in (
        ttlaunch("report b").stderr
    )


def test_a_run_that_ended_in_its_first_step_is_not_compared(ttlaunch, make_run):
    """Whatever the formula would have made of it."""
    make_run("a", status="failed", failure=None, steps=0, formula=FORMULA.replace('"server")', '"boss")'))
    answer = ttlaunch("report")
    assert ("", True) == (answer.stderr, "not compared: the run ended within its first step" in answer.stdout)


def test_a_run_without_books_says_why(ttlaunch, make_run):
    make_run("a", [WORKER])
    assert (
        "not every rank kept telemetry; it ended too early, or was made by an older ttlaunch"
        in ttlaunch("report").stdout
    )
    assert 1 == ttlaunch("report --format concise").stdout.count("\n")
    make_run("b", [], program=True)
    assert "the run was of a program, and only ranks of recipes keep telemetry" in ttlaunch("report b").stdout


def test_a_run_that_goes_on_is_shown_so_far(ttlaunch, make_run):
    make_run("a", status=None)
    assert "cut off: two (two), 2 ranks, 10 steps" in ttlaunch("report").stdout
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, env=os.environ | {contract.ENV_RUN_ID: "a"})
    try:
        shown = ttlaunch("report").stdout
    finally:
        process.communicate()
    assert "running: two (two), 2 ranks, 10 steps" in shown
    assert "still running; this is what is written so far" in shown
    assert "sent in 9 steps" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "error[P030]: there is no run in runs\n"),
        ("1999", "error[P030]: `1999` names no run in runs and no path to one\n"),
        ("--runs-dir other", "error[P030]: there is no run in other\n"),
    ],
)
def test_a_run_that_is_not_there_is_refused(ttlaunch, words, message):
    answer = ttlaunch(f"report {words}")
    assert (2, "", True) == (answer.status, answer.stdout, answer.stderr.startswith(message))
    assert "hint: `--runs-dir DIR` names the folder of runs" in answer.stderr


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"ranks": [1]}', '{"ranks": [{"rank": 0}]}'])
def test_a_plan_that_is_none_is_refused(ttlaunch, here, text):
    (here / "runs" / "a").mkdir(parents=True)
    (here / "runs" / "a" / contract.PLAN_FILE).write_text(text)
    answer = ttlaunch("report")
    assert (3, "error[P031]: the run a cannot be read: ") == (answer.status, answer.stderr[:39])


def test_a_line_that_a_killed_rank_did_not_finish_is_passed_over(ttlaunch, make_run):
    run = make_run("a")
    with (run / contract.traffic_file(0)).open("a") as file:
        file.write('{"format": 1, "first": 11, "la')
    assert 10 == json.loads(ttlaunch("report --format json").stdout)["traffic"]["steps"]


@pytest.fixture
def learned(make_run):
    """A run whose worker reports a loss that falls from 4 to 1."""
    run = make_run("2026-01-01T00-00-00-aaaa")
    steps = [{"kind": "step", "time": 100.0 + step, "step": step, "loss": 4.0 - step / 4} for step in range(13)]
    (run / contract.progress_file(0)).write_text("".join(json.dumps(one) + "\n" for one in steps[1:]))
    return run


def test_plot_draws_the_loss_in_the_terminal(ttlaunch, learned, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    answer = ttlaunch("report --plot")
    assert (0, "") == (answer.status, answer.stderr)
    lines = answer.stdout.splitlines()
    assert "  training: line (mean of all ranks)   validation: o" == lines[-1]
    assert "steps" in lines[-2]
    assert max(map(len, lines)) <= 60
    rows = [line for line in lines if "┤" in line]
    assert 14 == len(rows)
    falling = [len(row.rstrip(" o")) for row in rows if row.partition("┤")[2].strip(" o")]
    assert falling == sorted(falling)


def test_svg_is_a_picture_over_steps_seconds_and_bytes(ttlaunch, learned, here):
    assert "wrote loss.svg\n" == ttlaunch("report --out loss.svg").stdout
    picture = (here / "loss.svg").read_text()
    assert all(title in picture for title in (">steps<", ">seconds of training<", ">MB sent by all ranks<"))
    answer = ttlaunch("report --out no/where.svg")
    assert (2, "") == (answer.status, answer.stdout)
    assert "no/where.svg" in answer.stderr


def test_the_points_of_the_curve_can_be_read_by_programs(ttlaunch, learned):
    told = json.loads(ttlaunch("report --plot --format json").stdout)
    assert {"step": 12, "loss": 1.0, "seconds": 11.0} == told["training"][-1]
    assert [0, 10] == [point["step"] for point in told["validation"]]
    lines = ttlaunch("report --plot --format concise").stdout.splitlines()
    assert ("training\t12\t1.0\t11.0", 14) == (lines[11], len(lines))


def test_a_run_without_losses_says_so(ttlaunch, make_run):
    run = make_run("2026-01-01T00-00-00-aaaa", program=True)
    for rank in range(2):
        (run / contract.progress_file(rank)).write_text("")
    assert "no rank reported a loss that can be drawn" in ttlaunch("report --plot").stdout
