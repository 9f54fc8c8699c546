"""`ttlaunch parity`: one class where recipes are right; a wrong one is named with the command that shows it again."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttlaunch.app.signals import interruptible
from ttlaunch.lab.parity import Parity, Result

RECIPE = Path(__file__).parents[2] / "recipes" / "data_parallel"
PART = "--recipe data_parallel --ranks 3 --accumulation 3 --precision fp32 --steps 3"
HEADINGS = "precision layout ranks accumulation class difference sent ÷formula memory time"
SIMULATED = f"parity --simulate {PART}"


def wrong_recipe(folder, trainer):
    """A copy of the data-parallel recipe in the current folder, whose workers are wrapped."""
    copy = folder / "recipes" / "data_parallel"
    shutil.copytree(RECIPE, copy)
    with (copy / "trainer.py").open("a") as file:
        file.write(f"\n\n_worker = worker\n\n\ndef worker(cfg, ctx):\n{trainer}")


@pytest.mark.slow
def test_a_right_recipe_has_one_class(ttlaunch):
    answer = ttlaunch(SIMULATED)
    assert (0, "") == (answer.status, answer.stderr)
    heading, *rows, verdict = answer.stdout.splitlines()
    assert HEADINGS.split() == heading.split()
    assert [["fp32", "one", "process", "1", "3", "A", "0"], ["fp32", "data", "parallel", "3", "3", "A", "0"]] == [
        row.split()[:7] for row in rows
    ]
    assert verdict.startswith("fp32: 2 cells in class A (")


@pytest.fixture
def carried_out(monkeypatch):
    """Cells that have come to one and the same end, each named once it is carried out; nothing is trained."""
    cells = []

    def carry_out(_self, cell, _folder):
        cells.append(cell.layout)
        size = 1_500_000 * (len(cells) > 1)
        return Result(cell, cell.command(steps=3, simulated=True), "a" * 64, None, 300_000_000, 1.25, size, size)

    monkeypatch.setattr(Parity, "_run_cell", carry_out)
    return cells


def test_concise_is_a_line_for_each_cell_and_nothing_else(ttlaunch, carried_out):
    answer = ttlaunch(f"{SIMULATED} --format concise")
    assert [
        ["fp32", "one process", "1", "3", "A", "0", "0.00 MB", "1", "300 MB", "1.2 s"],
        ["fp32", "data parallel", "3", "3", "A", "0", "1.50 MB", "1.000", "300 MB", "1.2 s"],
    ] == [line.split("\t") for line in answer.stdout.splitlines()]
    assert "" == answer.stderr


@pytest.mark.mpi
def test_real_ranks_have_the_class_of_simulated_ones(ttlaunch):
    real, simulated = (
        json.loads(ttlaunch(f"parity {words} {PART} --format json").stdout) for words in ("", "--simulate")
    )
    assert [[], []] == [real["diagnostics"], simulated["diagnostics"]]
    hashes = {cell["sha256"] for answer in (real, simulated) for cell in answer["cells"]}
    assert (1, ["A"] * 4) == (len(hashes), [cell["class"] for answer in (real, simulated) for cell in answer["cells"]])
    assert all(50e6 < cell["memory_bytes"] < 4e9 for answer in (real, simulated) for cell in answer["cells"])


@pytest.mark.slow
def test_a_recipe_with_other_bits_is_named_with_the_command_that_shows_it(ttlaunch, here):
    wrong_recipe(
        here,
        "    training = cfg.training_config\n"
        "    other = training.model_copy(update={'learning_rate': training.learning_rate * (1 + 1e-6)})\n"
        "    _worker(cfg.model_copy(update={'training_config': other}), ctx)\n",
    )
    answer = ttlaunch(SIMULATED)
    assert 1 == answer.status
    assert ["A", "B"] == [row.split()[5] for row in answer.stdout.splitlines()[1:3]]
    message = (
        "error[R040]: data parallel, 3 ranks, accumulation 3, fp32: the parameters differ from those of one process"
    )
    assert answer.stderr.startswith(message)
    difference = float(answer.stderr.splitlines()[0].rpartition(" by up to ")[2])
    assert 0 < difference < 1e-4
    found, one_process = (
        json.loads(ttlaunch([*shlex.split(line.split("`")[1])[1:], "--format", "json"]).stdout)["parameters_sha256"]
        for line in answer.stderr.splitlines()
        if line.startswith("hint: ")
    )
    assert f"SHA-256 {found}, expected {one_process}" in answer.stderr


def test_a_recipe_that_breaks_is_named_and_the_others_are_compared(ttlaunch, here):
    wrong_recipe(here, "    raise ValueError('no such bucket')\n")
    answer = json.loads(ttlaunch(f"{SIMULATED} --format json").stdout)
    assert ["A", None] == [cell["class"] for cell in answer["cells"]]
    (diagnostic,) = answer["diagnostics"]
    assert "R041" == diagnostic["code"]
    assert "data parallel, 3 ranks, accumulation 3, fp32 did not come to its end: rank 0" in diagnostic["message"]
    assert "raised ValueError" in diagnostic["message"]


def test_kept_results_are_not_repeated_unless_the_code_changes(ttlaunch, here, carried_out):
    line = f"{SIMULATED} --out kept.jsonl --format json"
    first, second = (json.loads(ttlaunch(line).stdout)["cells"] for _ in range(2))
    assert [False, False] == [cell["was_kept"] for cell in first]
    assert [False, True] == [cell["was_kept"] for cell in second]  # the reference's weights are needed
    assert [cell["sha256"] for cell in first] == [cell["sha256"] for cell in second]
    wrong_recipe(here, "    raise ValueError('no such bucket')\n")
    third = json.loads(ttlaunch(line).stdout)["cells"]
    assert [False, False] == [cell["was_kept"] for cell in third]
    assert 2 + 1 + 2 == len(carried_out)


def test_a_failure_is_an_annotation_in_ci(ttlaunch, monkeypatch):
    failed = lambda _self, cell, _folder: Result(cell, "", None, None, None, 0.0, error="no such bucket")  # noqa: E731
    monkeypatch.setattr(Parity, "_run_cell", failed)
    answer = ttlaunch(f"{SIMULATED} --format github")
    assert (1, True) == (answer.status, answer.stderr.startswith("::error "))


def test_what_is_no_part_of_the_matrix_is_refused(ttlaunch):
    answer = ttlaunch("parity --recipe fabric_minimal --accumulation 5 --precision fp8 --format concise")
    assert 2 == answer.status
    lines = answer.stderr.splitlines()
    assert 3 == len(lines)
    assert "`--accumulation 5` is not among" in lines[2]
    assert "" == answer.stdout
    (said,) = ttlaunch("parity --recipe fully_sharded --simulate").stderr.splitlines()[1:2]
    assert " = note: these end with the bits of one process; torch, as in fully_sharded, adds in another order" in said


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("--recipe data_parallel --ranks 50", "no layout has 50 ranks; those of `data_parallel` have 1 to 4"),
        ("--recipe pipeline_parallel --ranks 1", "no layout has 1 rank; those of `pipeline_parallel` have 2 to 4"),
        ("--ranks 4 --ranks 7", "no layout has 7 ranks; those of `hierarchical_parallel`, `data_parallel`, "),
        (
            "--recipe hierarchical_parallel --ranks 1 --accumulation 3 --precision bf16",
            "nothing would be compared: all that is left is one process, 1 rank, accumulation 3, bf16",
        ),
    ],
)
def test_a_part_with_nothing_to_compare_is_refused_before_anything_is_trained(ttlaunch, part, message, monkeypatch):
    monkeypatch.setattr(Parity, "results", lambda _self, _cells: pytest.fail("it was started"))
    answer = ttlaunch(f"parity --simulate --format concise {part}")
    assert (2, "", 1) == (answer.status, answer.stdout, answer.stderr.count("\n"))
    assert answer.stderr.startswith(f"error[P009]: {message}")
    diagnostics = json.loads(ttlaunch(f"parity --simulate --format json {part}").stdout)["diagnostics"]
    assert ["P009"] == [diagnostic["code"] for diagnostic in diagnostics]


@pytest.mark.parametrize("name", ["no/such/folder/f", "."])
def test_results_that_cannot_be_kept_are_refused_before_anything_is_trained(ttlaunch, name):
    answer = ttlaunch(f"{SIMULATED} --out {name}")
    assert (2, "") == (answer.status, answer.stdout)
    assert answer.stderr.startswith(f"error[P032]: {name} cannot be used for results: ")
    (diagnostic,) = json.loads(ttlaunch(f"{SIMULATED} --out {name} --format json").stdout)["diagnostics"]
    assert "P032" == diagnostic["code"]


def test_a_disk_that_gets_full_ends_the_matrix(ttlaunch, here, monkeypatch):
    """A file that becomes `/dev/full` takes no further line."""

    def carry_out(self, cell, _folder):
        (here / "kept").unlink()
        (here / "kept").symlink_to("/dev/full")
        return Result(cell, "", None, None, None, 0.0, error="it was not started")

    monkeypatch.setattr(Parity, "_run_cell", carry_out)
    answer = ttlaunch(f"{SIMULATED} --out kept")
    assert 2 == answer.status
    assert answer.stderr.startswith("error[P032]: kept cannot be used for results: no space left on device")


def test_ctrl_c_ends_what_runs_and_says_how_far_it_came(tmp_path):
    command = [sys.executable, "-m", "ttlaunch", "parity", "--simulate", "--steps", "100000"]
    deadline = time.monotonic() + 120
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (cells := started(process.pid)):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()  # its cells end with it
    assert (130, True) == (process.returncode, err.startswith("interrupted after 0 of "))
    while [pid for pid in cells if Path(f"/proc/{pid}").exists()]:  # one that was being started ends with its parent
        assert time.monotonic() < deadline
        time.sleep(0.02)


def started(pid):
    """The processes of cells: children of any thread of the command."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for several in children for child in several]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_can_be_answered_only_where_a_command_says_so(number):
    """Ctrl-C leaves at once while the command line is imported, or checks what was typed; then it ends what runs."""
    left = []
    before = signal.signal(number, lambda *_: left.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(number)
        with interruptible(signal.SIGUSR1):
            signal.raise_signal(number)
        signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert [number, number] == left
