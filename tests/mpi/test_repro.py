"""`ttlaunch repro`: the same bits again, and never another program under an old run's name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import FORKED

pytestmark = pytest.mark.mpi

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = """\
training_config: {steps: 4, batch_size: 4, micro_batch_size: 2, validation_sequences: 4, data_path: book.txt}
transformer_config: {num_blocks: 1, num_heads: 2, embedding_dim: 16, max_sequence_length: 16}
multihost_config: {num_workers: 2}
"""


class Folder:
    """A folder with a recipe and a text of its own, and a run of them; or without."""

    def __init__(self, path, *, is_empty=False):
        self.path = path
        if is_empty:
            return
        shutil.copytree(RECIPES / "data_parallel", path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
        (path / "book.txt").write_text("to be or not to be, that is the question\n" * 200)
        (path / "train.yaml").write_text(TINY)

    def ttlaunch(self, *words, at="."):
        return subprocess.run(
            [sys.executable, "-m", "ttlaunch", *words],
            cwd=self.path / at,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "NO_COLOR": "1"},
        )

    def runs(self):
        return sorted(path for path in (self.path / "runs").glob("[!.]*") if path.is_dir())


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder in which a run has come to its end."""
    folder = Folder(tmp_path_factory.mktemp("repro"))
    answer = folder.ttlaunch("run", "mine", "-n", "2", "-c", "train.yaml", *FORKED)
    assert answer.returncode == 0, answer.stderr
    return folder


def test_a_repeated_run_gives_the_same_bits_from_any_folder(first):
    (first.path / "elsewhere").mkdir()
    (first.path / "train.yaml").write_text("training_config: {steps: 1}\n")  # the run's own copy counts
    before = first.runs()
    answer = first.ttlaunch("repro", str(before[0]), "--runs-dir", "../runs", at="elsewhere")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == f"  same bits as     {before[0].name}"
    assert len(first.runs()) == len(before) + 1


def test_other_bits_are_a_failure(first):
    run = first.runs()[0]
    report = json.loads((run / "report.json").read_text())
    copy = first.path / "copies" / "run"
    shutil.copytree(run, copy)
    (copy / "report.json").write_text(json.dumps({**report, "parameters_sha256": "0" * 64}))
    answer = first.ttlaunch("repro", "run", "--runs-dir", "copies")
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-2] == "error[R053]: other bits than run: its parameters had sha256 000000000000…"


def test_another_recipe_is_refused_unless_asked_for(first, tmp_path):
    folder = Folder(tmp_path)
    shutil.copytree(first.runs()[0], tmp_path / "runs" / "run")
    plan = json.loads((tmp_path / "runs/run/plan.json").read_text())
    plan["recipe"]["folder"], plan["working_folder"] = str(tmp_path / "mine"), str(tmp_path)
    (tmp_path / "runs/run/plan.json").write_text(json.dumps(plan))
    trainer = tmp_path / "mine" / "trainer.py"
    trainer.write_text(trainer.read_text() + "\n# a remark\n")
    answer = folder.ttlaunch("repro")
    assert answer.returncode == 3
    first_line = answer.stderr.splitlines()[0]
    assert first_line.startswith(
        f"error[P033]: run cannot be repeated: the recipe in {tmp_path / 'mine'} has changed: its tree"
    )
    assert len(folder.runs()) == 1
    answer = folder.ttlaunch("repro", "--with-changes")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.splitlines()[0].startswith("warning[P033]: this is not run again: the recipe in ")
    assert answer.stdout.splitlines()[-1] == "  same bits as     run"


def test_a_recipe_that_has_changed_or_gone_is_repeated_as_it_was(tmp_path):
    folder = Folder(tmp_path)
    alone = ("--set", "multihost_config.num_workers=1")
    assert folder.ttlaunch("run", "mine", "-n", "1", "-c", "train.yaml", *alone).returncode == 0
    run = folder.runs()[0].name
    trainer = tmp_path / "mine" / "trainer.py"
    trainer.write_text("raise RuntimeError\n")
    answer = folder.ttlaunch("repro", run)
    assert answer.returncode == 0, answer.stderr
    assert (
        f"warning[P033]: {run} is repeated with the code that it ran: the recipe in {trainer.parent} has changed"
        in answer.stderr
    )
    assert answer.stdout.splitlines()[-1] == f"  same bits as     {run}"
    shutil.rmtree(trainer.parent)
    again = folder.ttlaunch("repro", "latest")  # of the repeated run, whose recipe's folder is the kept one
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == f"  same bits as     {folder.runs()[1].name}"
    assert len({json.loads((path / "code.json").read_text())["kept"]["program"]["tree"] for path in folder.runs()}) == 1
    assert folder.ttlaunch("runs", "clean", "--yes").returncode == 0
    assert [] == list((tmp_path / "runs").glob(".code-*/*/*/*"))


def test_kept_code_that_was_changed_is_not_run(tmp_path):
    folder = Folder(tmp_path)
    (tmp_path / "hello.py").write_text("print('hello')\n")
    assert folder.ttlaunch("run", "hello.py").returncode == 0
    (tmp_path / "hello.py").write_text("print('bye')\n")
    again = folder.ttlaunch("repro", "latest")
    assert (again.returncode, "rank 0 rank | hello" in again.stdout.splitlines()) == (0, True), again.stderr
    present = folder.ttlaunch("repro", folder.runs()[0].name, "--with-changes")
    assert (present.returncode, "rank 0 rank | bye" in present.stdout.splitlines()) == (0, True), present.stderr
    for path in (tmp_path / "runs").glob(".code-*/*/*/*"):
        if path.is_file() and path.read_bytes() == b"print('hello')\n":
            path.write_text("print('evil')\n")
    answer = folder.ttlaunch("repro", folder.runs()[0].name)
    assert answer.returncode == 3
    assert f"error[P033]: {folder.runs()[0].name} cannot be repeated: the script" in answer.stderr
    assert "was changed" in answer.stderr
    assert "evil" not in answer.stdout


def test_a_run_is_repeated_with_the_ttlaunch_that_it_ran(tmp_path):
    """Launcher and ranks are those of then, whatever has become of them since."""
    folder, package = Folder(tmp_path), tmp_path / "package"
    for name in ("ttlaunch", "recipes", "configurations"):
        shutil.copytree(RECIPES.parent / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "which.py").write_text("import ttlaunch\nprint('with', ttlaunch.__file__)\n")
    environment = {**os.environ, "PYTHONPATH": str(package)}

    def ours(*words):
        command = [sys.executable, "-P", "-m", "ttlaunch", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    first = ours("run", "which.py")
    assert f"with {package}/ttlaunch/__init__.py" in first.stdout, first.stderr
    (run,) = folder.runs()
    with (package / "ttlaunch" / "lab" / "play.py").open("a") as file:
        file.write("# changed\n")
    answer = ours("repro", run.name)
    assert answer.returncode == 0, answer.stderr
    tree = json.loads((run / "code.json").read_text())["kept"]["package"]
    assert f"with {next((tmp_path / 'runs').glob('.code-*'))}/trees/{tree}/ttlaunch/__init__.py" in answer.stdout
    assert f"warning[P034]: {run.name} is repeated with ttlaunch as it was then" in answer.stderr
    assert tree == json.loads((folder.runs()[1] / "code.json").read_text())["kept"]["package"]
    present = ours("repro", run.name, "--with-changes")
    assert f"with {package}/ttlaunch/__init__.py" in present.stdout


def test_another_text_is_refused(first, tmp_path):
    shutil.copytree(first.path, tmp_path / "all")
    run = next(path for path in sorted((tmp_path / "all/runs").glob("[!.]*")) if path.is_dir())
    plan = json.loads((run / "plan.json").read_text())
    plan["recipe"]["folder"], plan["working_folder"] = str(tmp_path / "all/mine"), str(tmp_path / "all")
    (run / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "all/book.txt").write_text("something else entirely, and long enough\n" * 200)
    folder = Folder.__new__(Folder)
    folder.path = tmp_path / "all"
    answer = folder.ttlaunch("repro", run.name)
    assert answer.returncode == 3
    assert answer.stderr.splitlines()[0].startswith(
        f"error[P033]: {run.name} cannot be repeated: the text {first.path / 'book.txt'} has changed: its SHA-256"
    )


def test_a_program_is_repeated_with_its_arguments(first, tmp_path):
    folder = Folder(tmp_path)
    assert folder.ttlaunch("run", "-n", "2", "--", "sh", "-c", "echo $TTLAUNCH_RANK heard $0", "a b").returncode == 0
    answer = folder.ttlaunch("repro")
    assert answer.returncode == 0, answer.stderr
    assert sorted(line for line in answer.stdout.splitlines() if "heard" in line) == [
        f"rank {rank} rank | {rank} heard a b" for rank in range(2)
    ]
    assert "same bits" not in answer.stdout


def test_a_folder_that_says_nothing_is_refused(first):
    broken = first.path / "broken" / "run"
    broken.mkdir(parents=True)
    (broken / "plan.json").write_text("{}")
    answer = first.ttlaunch("repro", "run", "--runs-dir", "broken")
    assert answer.returncode == 3
    assert (
        answer.stderr.splitlines()[0] == "error[P031]: the run run cannot be read: code.json: no such file or directory"
    )


def test_a_repeated_program_that_falls_silent_is_ended_after_the_hang_timeout(tmp_path):
    folder = Folder(tmp_path)
    (tmp_path / "once.sh").write_text("test -e again && exec sleep 600\ntouch again\n")
    assert folder.ttlaunch("run", "--", "sh", "once.sh").returncode == 0
    answer = folder.ttlaunch("repro", "--hang-timeout", "1")
    assert (answer.returncode, "error[R0" in answer.stderr) == (6, True), answer.stderr


def test_an_asynchronous_run_is_repeated_in_its_order_of_arrivals(tmp_path):
    """D7: real workers, one of them slow; the order is chance, and the bits are those of the order."""
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question\n" * 200)
    (tmp_path / "train.yaml").write_text(
        TINY.replace("steps: 4", "steps: 12")
        + "elastic_dp_config: {slow_workers: {0: 4}, pull_interval: 2}\ncompression_config: {kind: int8}\n"
    )
    folder = Folder(tmp_path, is_empty=True)
    answer = folder.ttlaunch("run", "elastic_dp", "-c", "train.yaml", *FORKED)
    assert answer.returncode == 0, answer.stderr
    again = folder.ttlaunch("repro", "latest")
    assert again.returncode == 0, again.stderr
    first, second = folder.runs()
    assert again.stdout.splitlines()[-1] == f"  same bits as     {first.name}"

    def order(run):
        lines = (run / "records" / "rank-2.progress.jsonl").read_text().splitlines()
        return [record["arrived_from"] for record in map(json.loads, lines) if "arrived_from" in record]

    assert order(first) == order(second)
    assert 12 == len(order(first))
    assert order(first) == json.loads((second / "plan.json").read_text())["replay"]
    traffic = json.loads((first / "report.json").read_text())["traffic"]
    assert traffic["not_compared"] is None
    assert [] == [edge for edge in traffic["edges"] if edge["bytes"] != edge["formula_bytes"]]


def test_a_run_with_old_gradients_is_repeated_in_one_process_from_its_records(tmp_path):
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question\n" * 200)
    (tmp_path / "train.yaml").write_text(TINY.replace("steps: 4", "steps: 12"))
    folder = Folder(tmp_path, is_empty=True)
    answer = folder.ttlaunch("run", "classic_dp", "-c", "train.yaml", *FORKED)
    assert answer.returncode == 0, answer.stderr
    again = folder.ttlaunch("repro", "latest")
    assert again.returncode == 0, again.stderr
    first, second = folder.runs()
    assert again.stdout.splitlines()[-1] == f"  same bits as     {first.name}"
    plan = json.loads((second / "plan.json").read_text())
    assert (1, 12) == (plan["world_size"], len(plan["updates"]))
    records = first / "records" / "rank-0.progress.jsonl"
    lines = [
        line
        for line in records.read_text().splitlines(keepends=True)
        if '"update", ' not in line or '"step": 7,' not in line
    ]
    records.write_text("".join(lines))
    refused = folder.ttlaunch("repro", first.name)
    assert (3, True) == (refused.returncode, "there is no record of what update 7 was made of" in refused.stderr)


def test_a_variable_of_the_command_line_is_given_again_or_warned_of(tmp_path):
    folder = Folder(tmp_path, is_empty=True)
    (tmp_path / "heard.py").write_text("import os\nprint('heard', os.environ.get('OMP_NUM_THREADS'))\n")
    run = folder.ttlaunch("run", "heard.py", "--env", "OMP_NUM_THREADS=7", "--env", "HF_TOKEN=canary")
    assert 0 == run.returncode, run.stderr
    (made,) = _runs(tmp_path)
    origins = json.loads((made / "environment.json").read_text())["variables"]
    assert ["--env", "--env"] == [origins["OMP_NUM_THREADS"], origins["HF_TOKEN"]]

    again = folder.ttlaunch("repro", made.name)
    assert "it ran with `--env OMP_NUM_THREADS`" in again.stderr
    assert "`--env HF_TOKEN=VALUE` sets it again" in again.stderr
    assert "heard 7" not in again.stdout
    same = folder.ttlaunch("repro", made.name, "--env", "OMP_NUM_THREADS=7", "--env", "HF_TOKEN=x")
    assert (0, False) == (same.returncode, "--env" in same.stderr), same.stderr
    assert "rank 0 rank | heard 7" in same.stdout


def _runs(folder):
    return [path for path in (folder / "runs").iterdir() if (path / "plan.json").is_file()]
