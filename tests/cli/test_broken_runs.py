"""Folders of runs that are broken, of other versions or of somebody's making: every command says what is wrong with them."""

import json
import os

import pytest

from ttlaunch import contract

ROW = {"rank": 0, "host": "box", "slot": 0, "role": "worker"}
PLAN = {"recipe": {"name": "mine", "folder": "/nowhere"}, "layout": "two", "ranks": [ROW], "environment": {}}
REPORT = {"status": "done", "exit_status": 0, "steps": 3, "failure": None, "ranks": [ROW]}
STEP = {"kind": "step", "time": 1.0, "step": 1, "loss": 1.0}
NOT_NUMBERS = (
    '{"kind": "step", "time": 1, "step": Infinity, "tokens": Infinity, "loss": 1}\n{"kind": "stopping", "step": NaN}\n'
)
STRETCH = {"rank": 0, "stream": "stdout", "time": 1.0, "offset": 0, "length": 6}
COMMANDS = ("report {}", "report {} --format json", "logs {}", "logs {} --format json", "diff {} good", "stop {}")


@pytest.fixture
def make_run(here):
    """`make_run(name, {file: content})`: the folder of a run that is over, with some files replaced."""

    def make(name, files):
        run = here / "runs" / name
        for folder in (contract.LOGS_DIR, contract.RECORDS_DIR):
            (run / folder).mkdir(parents=True)
        content = {contract.PLAN_FILE: PLAN, contract.REPORT_FILE: REPORT, contract.stdout_file(0): "hello\n"} | files
        for file, value in content.items():
            if value is not None:
                (run / file).write_text(value if isinstance(value, str) else json.dumps(value))
        return run

    return make


NO_REPORT = "report.json is not a report of this version:"
BROKEN = {
    "a plan that is nested too deeply": (
        {contract.PLAN_FILE: "[" * 100_000},
        "plan.json is not usable: it is nested more than 32 deep",
    ),
    "a plan that is a list": ({contract.PLAN_FILE: [1]}, "plan.json is not an object"),
    "a plan whose ranks are words": ({contract.PLAN_FILE: PLAN | {"ranks": ["a"]}}, "plan.json is not a plan"),
    "an empty report": ({contract.REPORT_FILE: {}}, f"{NO_REPORT} `status` is not a text"),
    "a report of other types": ({contract.REPORT_FILE: REPORT | {"status": 5}}, f"{NO_REPORT} `status` is not a text"),
    "a report whose failure is a list": (
        {contract.REPORT_FILE: REPORT | {"failure": [1]}},
        f"{NO_REPORT} `failure` is not an object",
    ),
    "a report whose ranks are numbers": (
        {contract.REPORT_FILE: REPORT | {"ranks": [5]}},
        f"{NO_REPORT} `ranks` is not an object",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_report_says_what_is_wrong_with_a_run(ttlaunch, make_run, what):
    files, reason = BROKEN[what]
    make_run("broken", files)
    answer = ttlaunch("report broken")
    first = f"error[P031]: the run broken cannot be read: {reason}"
    assert (contract.STATUS_DESCRIPTION, first) == (answer.status, answer.stderr.splitlines()[0])


ODD = {
    "numbers that are none": {contract.REPORT_FILE: None, contract.progress_file(0): NOT_NUMBERS},
    "what was not kept, of other types": {
        contract.REPORT_FILE: REPORT | {"ranks": [ROW | {"unkept_output": {"stdout": "x"}}]}
    },
    "a merged log of another making": {
        "logs/merged.jsonl": "".join(
            json.dumps(STRETCH | change) + "\n"
            for change in (
                {"offset": "0"},
                {"length": -6},
                {"length": 1e30},
                {"time": "x"},
                {"unkept": "y"},
                {"rank": 99},
                {},
            )
        )
    },
    "names with newlines": {contract.PLAN_FILE: PLAN | {"ranks": [ROW | {"role": "a\nb\x1b[31m", "host": "h\n"}]}},
}


@pytest.mark.parametrize("what", [*BROKEN, *ODD])
def test_every_command_bears_every_run(ttlaunch, make_run, what):
    make_run("good", {})
    make_run("odd", BROKEN[what][0] if what in BROKEN else ODD[what])
    for command in COMMANDS:
        assert ttlaunch(command.format("odd")).status in {0, 2, 3}, command
    for command in ("ps --all", "ps --all --format json", "runs clean --dry-run"):
        assert 0 == ttlaunch(command).status


def test_a_named_pipe_among_the_records_is_not_waited_for(ttlaunch, make_run):
    run = make_run("odd", {})
    os.mkfifo(run / contract.exit_file(0))
    assert 0 == ttlaunch("report odd").status


def test_a_good_line_of_a_merged_log_is_shown_among_bad_ones(ttlaunch, make_run):
    make_run("odd", ODD["a merged log of another making"])
    assert "rank 0 worker | hello\n" == ttlaunch("logs odd").stdout


def test_a_folder_without_a_plan_is_said_to_be_no_run_and_the_missing_file_is_named(ttlaunch, make_run):
    make_run("broken", {contract.PLAN_FILE: None})

    for where in ("broken", "runs/broken"):
        answer = ttlaunch(f"report {where}")

        assert 2 == answer.status
        assert "runs/broken is the folder of no run: it has no plan.json\n\nhint: `ttlaunch ps`" in answer.stderr


def test_a_file_that_a_run_lacks_is_named(ttlaunch, make_run):
    make_run("broken", {})

    assert "the run broken cannot be read: code.json: no such file" in ttlaunch("repro broken").stderr
