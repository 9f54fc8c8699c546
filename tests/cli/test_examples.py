"""Every example of a help text does what it says: simulations run with a tiny model, runs are planned."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from ttlaunch.cli import export, hosts, parity, place, plan, report, run, show, simulate, submit, weights
from ttlaunch.lab.parity import Parity

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = {
    "training_config.steps": 1,
    "training_config.validation_sequences": 2,
    "transformer_config.embedding_dim": 8,
    "transformer_config.num_heads": 1,
    "transformer_config.max_sequence_length": 8,
}


def examples(text):
    """The command lines of a help text, as they would be typed."""
    found = re.findall(r"\[bold\]ttlaunch (.*?)\[/bold\]", text)
    assert len(found) == text.count("ttlaunch ")
    return found


@pytest.fixture
def ready(here, trained, write_cluster):
    """What the examples name: a recipe, a text, programs, bindings, a cluster, and a run with a checkpoint."""
    shutil.copytree(RECIPES / "hierarchical_parallel", here / "my_recipe")
    shutil.copyfile(here / "my_recipe" / "train.yaml", here / "train.yaml")
    (here / "book.txt").write_text("It was a dark night, and it rained on every street. " * 2000)
    for name in ("any_program", "program"):
        (here / name).write_text("#!/bin/sh\n")
        (here / name).chmod(0o755)
    write_cluster(here / "configurations" / "my_cluster", [(0, 1), (1, 2), (2, 3)])
    write_cluster(here, [(0, 1)])
    (here / "rank_bindings.yaml").rename(here / "FILE")
    return trained("2026-08-23T10-14-07-3fa1", 10)


# `--what-if` makes five simulations, and `tests/lab/test_what_if.py` has its own tests.
@pytest.mark.parametrize("line", [line for line in examples(simulate.EXAMPLES) if "--what-if" not in line])
@pytest.mark.usefixtures("ready")
def test_the_examples_of_simulate_end_well(ttlaunch, line):
    line = line.replace("--ranks 64", "--ranks 8")  # many more ranks say no more, and take long
    answer = ttlaunch(tiny(f"{line} --set training_config.steps=3" if "--plan" in line else line))
    said = "on a virtual clock" if "--virtual" in line else "\ndone: "
    assert (0, True) == (answer.status, said in answer.stdout), answer


# `--step-time` measures this machine with real ranks, for which `tests/mpi/test_calibration.py` has its own test.
TO_PLAN = [line for text in (run.EXAMPLES, plan.EXAMPLES, place.EXAMPLES) for line in examples(text)]


@pytest.mark.parametrize("line", [line for line in TO_PLAN if "--step-time" not in line])
@pytest.mark.usefixtures("ready", "forked_predictions")
def test_the_examples_of_run_plan_and_place_can_be_planned(ttlaunch, here, line):
    (here / "train.py").touch()
    if "--predict" in line or "--fits" in line:  # those play a step
        line = tiny(line)
    answer = ttlaunch(as_plan(line.replace("10.0.0.1:", "127.0.0.1:")))  # an address that this machine has
    assert (0, True) == (answer.status, len(answer.stdout.splitlines()) > 1), answer.stderr


@pytest.mark.parametrize("line", examples(show.EXAMPLES))
@pytest.mark.usefixtures("here")
def test_the_examples_of_show_draw(ttlaunch, line):
    answer = ttlaunch(line)
    assert (0, "") == (answer.status, answer.stderr)


def tiny(line):
    """Return a command with keys that make its model tiny and its training one step, but for keys that the command sets itself."""
    given = [word.partition("=")[0] for word in line.split()]
    return line + "".join(f" --set {key}={value}" for key, value in TINY.items() if key not in given)


def as_plan(line):
    """The same line, with nothing started."""
    verb, *words = shlex.split(line)
    return [verb, *(["--dry-run"] if verb == "run" else []), *words]


@pytest.mark.usefixtures("ready")
def test_the_examples_of_weights_export_show_and_begin_with_them(ttlaunch, here):
    lines = [line for text in (weights.EXAMPLES, weights.SHOW_EXAMPLES) for line in examples(text)]
    assert 6 == len(lines)
    for line in lines:
        if "--average" in line or "--as hf" in line:  # of servers only, and of whole models
            continue
        answer = ttlaunch(as_plan(line) if line.startswith("run ") else line)
        assert 0 == answer.status, (line, answer.stderr)
    assert (here / "weights.safetensors").is_file()


@pytest.mark.parametrize("line", examples(report.EXAMPLES))
@pytest.mark.usefixtures("ready")
def test_the_examples_of_report_find_the_run(ttlaunch, line):
    answer = ttlaunch(line)
    expected = "wrote loss.svg" if "--out" in line else "2026-08-23T10-14-07-3fa1"
    assert (0, True) == (answer.status, expected in answer.stdout)


@pytest.mark.parametrize("line", examples(parity.EXAMPLES))
def test_the_examples_of_parity_compare_cells(ttlaunch, line, monkeypatch):
    """Only the matrix: that each of its commands can be planned has a test of its own."""
    asked = []
    monkeypatch.setattr(Parity, "results", lambda _self, cells: iter(asked.append(cells) or ()))
    assert 0 == ttlaunch(line).status
    (cells,) = asked
    assert len(cells) > len({cell.precision for cell in cells})


def test_the_examples_of_hosts_write_hostfiles(ttlaunch, here, monkeypatch):
    variables = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1", "SKYPILOT_NODE_IPS": "10.0.0.1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (here / "hostfile").write_text("pi-worker-0.pi.default.svc slots=2\n")
    (here / "nodes.json").write_text('[{"node_ip": "10.0.0.1", "state": "ALIVE"}]')
    lines = [line.replace("/etc/mpi/", "") for line in examples(hosts.EXAMPLES)]
    assert 4 == len(lines)
    assert [0] * 4 == [ttlaunch(line).status for line in lines]
    assert "n2 slots=1" in (here / "hosts.txt").read_text()


@pytest.mark.parametrize("line", examples(submit.EXAMPLES))
@pytest.mark.usefixtures("ready")
def test_the_examples_of_submit_show_their_script(ttlaunch, here, line):
    (here / "train.py").touch()
    answer = ttlaunch(f"{line.removesuffix(' --dry-run')} --dry-run")
    assert (0, True) == (answer.status, "#SBATCH --partition=gpu\n" in answer.stdout), answer.stderr


@pytest.mark.parametrize("line", examples(export.EXAMPLES))
def test_the_examples_of_export_write_files(ttlaunch, here, line):
    (here / "train.py").write_text("")
    answer = ttlaunch(line)
    assert (0, True) == (answer.status, "kind: " in answer.stdout or (here / "job.yaml").is_file()), answer.stderr
