"""`ttlaunch submit`, as far as it needs no Slurm: the plan, the script, and what is refused before anything is written."""

import json
import os
from pathlib import Path

import pytest

from ttlaunch.app.slurm_job import made_progress, note_start, read_jobs, read_starts, write_job


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH_"))]:
        monkeypatch.delenv(name)


def test_a_dry_run_shows_the_plan_and_the_whole_script(ttlaunch, here):
    line = (
        "submit data_parallel --on slurm:gpu --nodes 2 --gres gpu:2 --time 1:00:00 --account us --qos high --grace 10"
    )
    answer = ttlaunch(f"{line} --dry-run")
    assert 0 == answer.status, answer
    options = [line.removeprefix("#SBATCH ") for line in answer.stdout.splitlines() if line.startswith("#SBATCH")]
    asked = ["--partition=gpu", "--nodes=2", "--gres=gpu:2", "--time=1:00:00", "--account=us", "--qos=high"]
    assert [] == [option for option in asked if option not in options]
    assert {"--signal=B:USR1@40", "--requeue", "--open-mode=append", "--export=NONE"} <= set(options)
    assert "slurm-2" in answer.stdout
    assert [] == list(here.iterdir())


@pytest.mark.parametrize("program", ["data_parallel", "train.py"])
def test_a_plan_shows_the_script_that_a_submission_without_options_has(ttlaunch, here, program):
    (here / "train.py").write_text("print()\n")
    line = f"{program} --on slurm:gpu --nodes 2 --time 1:00:00"
    script = json.loads(ttlaunch(f"submit {line} --dry-run --format json").stdout)["script"]
    assert script.startswith("#!/bin/sh\n#SBATCH ")
    assert script == json.loads(ttlaunch(f"plan {line} --format json").stdout)["script"]
    assert ttlaunch(f"plan {line}").stdout.endswith("\n" + script)
    assert {"train.py"} == {path.name for path in here.iterdir()}


def test_a_script_is_started_again_only_if_it_is_asked_for(ttlaunch, here):
    (here / "train.py").write_text("print()\n")
    for more, expected in (("", "--no-requeue"), ("--requeue", "--requeue")):
        answer = ttlaunch(f"submit train.py --on slurm:gpu --ranks 1 --dry-run --format json {more}")
        assert f"#SBATCH {expected}\n" in json.loads(answer.stdout)["script"], answer


def test_nothing_that_a_user_has_set_is_in_the_script(ttlaunch, here, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_SHELL", "hidden-1")
    (here / "train.py").write_text("print()\n")
    line = "submit --on slurm:gpu --ranks 1 --dry-run --format json --env A=hidden-2 --env TOKEN_OF_SHELL train.py -- --key hidden-3"
    script = json.loads(ttlaunch(line).stdout)["script"]
    assert "hidden" not in script


def test_a_job_submits_no_other_job(ttlaunch, here, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    answer = ttlaunch("submit data_parallel --on slurm:gpu")
    assert 2 == answer.status
    assert answer.stderr.startswith("error[P060]: this shell is in Slurm job 77, and a job submits no other\n")
    assert [] == list(here.iterdir())


def test_other_hosts_than_those_of_slurm_are_refused(ttlaunch, here):
    answer = ttlaunch("submit data_parallel")
    assert (2, True) == (answer.status, "`submit` hands runs to Slurm" in answer.stderr)
    assert [] == list(here.iterdir())


@pytest.mark.parametrize("time", ["1h", "", "1:2:3:4", "-5", "5\n#SBATCH --uid=0"])
def test_a_time_limit_that_slurm_does_not_read_is_refused(ttlaunch, here, time):
    answer = ttlaunch(["submit", "data_parallel", "--on", "slurm:gpu", f"--time={time}"])
    assert (2, True) == (answer.status, "--time" in answer.stderr), answer
    assert [] == list(here.iterdir())


def test_a_machine_without_sbatch_is_told_and_keeps_no_folder(ttlaunch, here, monkeypatch):
    programs = here.parent / "programs"
    programs.mkdir()
    for folder in os.environ["PATH"].split(":"):
        for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if path.name != "sbatch" and not (programs / path.name).exists():
                (programs / path.name).symlink_to(path)
    monkeypatch.setenv("PATH", str(programs))
    answer = ttlaunch("submit data_parallel --on slurm:gpu")
    assert 4 == answer.status, answer
    assert answer.stderr.startswith("error[P062]: this machine has no `sbatch`"), answer
    assert [] == [path.name for path in (here / "runs").iterdir() if path.name != ".gitignore"]


@pytest.fixture
def accepting(here, monkeypatch, tmp_path_factory):
    """Put a program in the place of Slurm's commands, which accepts every job."""
    programs = tmp_path_factory.mktemp("programs")
    for name in ("sbatch", "salloc", "srun", "squeue"):
        banner = "echo jobs of this site wait 7 minutes\n" if name == "sbatch" else ""
        (programs / name).write_text(f"#!/bin/sh\ntouch {here}/was-called\n{banner}echo 4711\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


@pytest.mark.parametrize("line", ["submit train.py --on slurm:gpu --ranks 1", "plan train.py", "run train.py"])
def test_json_has_the_warnings_that_are_shown_otherwise(ttlaunch, here, accepting, line):
    (here / "train.py").write_text("print()\n")
    for more in (
        ("--dry-run", "") if line.startswith("submit") else ("",) if line.startswith("plan") else ("--dry-run",)
    ):
        shown = ttlaunch(f"{line} --env PYTHONPAHT=x {more}")
        assert 0 == shown.status, shown
        answer = ttlaunch(f"{line} --env PYTHONPAHT=x {more} --format json")
        [warning] = json.loads(answer.stdout)["diagnostics"]
        assert f"warning[{warning['code']}]: {warning['message']}" in shown.stderr


def test_a_configuration_of_slurm_that_cannot_be_read_is_named_before_slurm_is_asked(
    ttlaunch, here, accepting, monkeypatch
):
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    answer = ttlaunch("submit data_parallel --on slurm:gpu")
    assert 4 == answer.status, answer
    assert answer.stderr.startswith("error[H049]: Slurm's commands find no configuration on this machine"), answer
    assert "`SLURM_CONF` names /nowhere/slurm.conf, which cannot be read" in answer.stderr
    assert [] == list(here.iterdir())
    assert 4 == ttlaunch("run data_parallel --on slurm:gpu").status  # its supervisor is another process, which prints
    assert not (here / "was-called").exists()


def start(folder, restarts, *, steps, layout="two", began=None):
    run = folder.parent / f"run-{len(read_starts(folder))}"
    run.mkdir()
    report = {
        "run_id": run.name,
        "status": "time limit",
        "steps": steps,
        "layout": layout,
        "began_from": began and {"origin": "/x", "step": began},
    }
    (run / "report.json").write_text(json.dumps(WHOLE | report))
    note_start(folder, run, restarts=restarts)


WHOLE = {
    **dict.fromkeys(("plan_hash", "name"), "x"),
    **dict.fromkeys(("exit_status", "world_size", "duration_s", "leftovers"), 1),
    **dict.fromkeys(
        (
            "first_validation",
            "last_validation",
            "last_perplexity",
            "tokens_per_s",
            "samples_per_s",
            "parameters_sha256",
            "failure",
            "startup_s",
        )
    ),
    "layer_grad_norms": {},
    "parameters_agree": True,
    "results": {},
    "ranks": [],
    "lost_checkpoints": [],
    "traffic": None,
}


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([(0, 5)], True),
        ([(0, 0)], False),
        ([(0, 5), (1, 6)], True),
        ([(0, 5), (1, 5)], False),
        ([(0, 5), (0, 9), (1, 9)], False),
        ([(0, 5), (1, 3), (1, 7)], True),
    ],
)
def test_a_start_makes_progress_if_it_finishes_a_step_that_none_before_it_had(tmp_path, starts, expected):
    folder = tmp_path / "job-1"
    folder.mkdir()
    for restarts, steps in starts:
        start(folder, restarts, steps=steps)
    assert made_progress(read_starts(folder)) is expected


def test_a_first_start_that_is_resumed_has_to_get_further_than_its_checkpoint(tmp_path):
    folder = tmp_path / "job-1"
    folder.mkdir()
    start(folder, 0, steps=10, began=10)
    assert not made_progress(read_starts(folder))


def test_a_job_without_a_start_makes_no_progress():
    assert not made_progress([])


def test_a_strangers_list_of_runs_leads_to_no_other_folder(tmp_path):
    (tmp_path / "started.jsonl").write_text(
        '{"run": "../x", "restarts": 0}\n{"run": 5}\nnot json\n{"run": "", "restarts": 0}\n'
    )
    assert [] == read_starts(tmp_path)


def test_jobs_are_read_back_and_damaged_ones_are_left_out(tmp_path):
    for name, number in (("job-a", "12"), ("job-b", "x")):
        (tmp_path / name).mkdir()
        write_job(tmp_path / name, number=number, name="work", submitted=1.0)
    assert ["12"] == [job.number for job in read_jobs(tmp_path)]


def test_an_address_for_workers_of_other_machines_is_refused_by_name(ttlaunch, here):
    answer = ttlaunch("submit data_parallel --on slurm:gpu --nodes 2 --elastic 1:2 --coordinator 10.0.0.1:7000")
    expected = "error[P082]: `--coordinator` names an address of the machine that starts the ranks, and Slurm chooses"
    assert (2, expected) == (answer.status, answer.stderr[: len(expected)])
    assert [] == list(here.iterdir())
