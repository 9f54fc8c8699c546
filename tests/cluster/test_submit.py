"""Runs that are submitted to Slurm: they save before their time limit, go on from there to the same bits, and leave nothing."""

import itertools
import json
import shutil
import subprocess
import sys
import tempfile

import pytest

from tests.cluster.hosts import ROOT
from tests.cluster.keeper import wait_until as _wait_until
from tests.cluster.slurm import SHARED

TRAIN = (
    "--set training_config.steps=60 --set training_config.validation_interval=60 --set checkpoint_config.interval=10 "
    "--set transformer_config.num_blocks=1"
)


def wait_until(condition, *, what, timeout_s):
    """Wait as the tests of hosts do; `what` is asked only when the time is up."""
    try:
        return _wait_until(condition, what="", timeout_s=timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"not within {timeout_s} s: {what()}") from error


@pytest.fixture
def submit(slurm4, request):
    """`submit("data_parallel …")`: submits from a folder that all hosts see; the returned object knows the job."""
    folder = f"{SHARED}/{request.node.name[:40].replace('[', '-').replace(']', '')}"
    slurm4.run("launcher", ["mkdir", "-p", folder])
    return lambda line, **environment: Submitted(slurm4, folder, line, environment)


class Submitted:
    """One job, seen from the login node."""

    def __init__(self, slurm, folder, line, environment):
        self.slurm, self.cwd = slurm, folder
        answer = self.ttlaunch(f"submit --format concise {line}", **environment)
        assert 0 == answer.returncode, answer.stderr
        self.number, self.stderr = answer.stdout.strip(), answer.stderr
        folders = slurm.cluster.path("launcher", f"{folder}/runs").glob("job-*/job.json")
        self.folder = next(path.parent for path in folders if json.loads(path.read_text())["job"] == self.number)

    def ttlaunch(self, line, **environment):
        cluster = self.slurm.cluster
        env = cluster.environment("launcher") | {"COLUMNS": "200", "NO_COLOR": "1"} | environment
        return self.slurm.run("launcher", [sys.executable, "-m", "ttlaunch", *line.split()], cwd=self.cwd, env=env)

    @property
    def state(self):
        answer = self.slurm.run("launcher", ["squeue", "-h", "--states=all", f"--jobs={self.number}", "--format=%T"])
        return answer.stdout.strip()

    @property
    def log(self):
        path = self.folder / "job.log"
        return path.read_text() if path.exists() else ""

    def runs(self):
        path = self.folder / "started.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [self.folder.parent / json.loads(line)["run"] for line in lines]

    def reports(self):
        return [json.loads((run / "report.json").read_text()) for run in self.runs()]

    def step(self):
        """The largest step that rank 0 of the last run has finished."""
        runs = self.runs()
        path = runs[-1] / "records/rank-0.progress.jsonl" if runs else None
        if path is None or not path.exists():
            return 0
        records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return max((record["step"] for record in records if record["kind"] == "step"), default=0)

    def show(self):
        return self.slurm.run("launcher", ["scontrol", "show", "job", self.number]).stdout

    def announce_limit(self):
        """Send what Slurm sends before the time limit, to whom it sends it."""
        self.slurm.run("launcher", ["scancel", "--signal=USR1", "--batch", self.number])

    def starts_again(self):
        """Wait until Slurm has started the job again."""
        runs = len(self.runs())
        wait_until(lambda: len(self.runs()) > runs, what=lambda: f"{self.show()}{self.log}", timeout_s=180)

    def ends(self, *, within_s=90):
        wait_until(
            lambda: self.state in {"COMPLETED", "FAILED", "CANCELLED", ""}, what=lambda: self.log, timeout_s=within_s
        )
        return self.state


@pytest.fixture(scope="module")
def unbroken():
    """The bits that a run has which is not submitted and not broken."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"run data_parallel --ranks 1 {TRAIN} --format json"
        command = [sys.executable, "-m", "ttlaunch", *line.split()]
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)["parameters_sha256"]


def test_a_job_that_is_told_of_its_time_limit_goes_on_to_the_bits_of_an_unbroken_run(submit, unbroken):
    job = submit(f"data_parallel --on slurm:debug --ranks 2 {TRAIN}")
    wait_until(lambda: job.step() >= 3, what=lambda: job.log, timeout_s=60)
    job.announce_limit()
    job.starts_again()
    assert "COMPLETED" == job.ends(), job.log
    first, second = job.reports()
    assert ("time limit", 9) == (first["status"], first["exit_status"])
    assert first["stopped"]["saved_step"] == second["began_from"]["step"] == first["steps"]
    assert unbroken == second["parameters_sha256"]


def test_a_job_that_slurm_itself_starts_again_goes_on_from_the_newest_checkpoint(submit, unbroken, slurm4):
    """Slurm itself starts the job again, which leaves the run no time to save."""
    job = submit(f"data_parallel --on slurm:debug --ranks 2 {TRAIN}")
    wait_until(
        lambda: list(job.runs()[-1:] and job.runs()[-1].glob("checkpoints/step-10")), what=lambda: job.log, timeout_s=60
    )
    slurm4.run("launcher", ["scontrol", "requeue", job.number])
    job.starts_again()
    assert "COMPLETED" == job.ends(), job.log
    last = json.loads((job.runs()[-1] / "report.json").read_text())
    assert last["began_from"]["step"] >= 10
    assert unbroken == last["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_time_limit_of_slurm_itself_loses_no_step(submit, unbroken, slurm4):
    """Slurm's shortest limit with time to train: it may tell a job a minute early, and ttlaunch asks for a minute itself."""
    recipe = slurm4.cluster.path("launcher", SHARED) / "slow_steps"
    shutil.copytree(ROOT / "recipes/data_parallel", recipe)
    trainer = (recipe / "trainer.py").read_text()
    loop = next(line for line in trainer.splitlines() if line.lstrip().startswith("for step in "))
    indent = " " * (len(loop) - len(loop.lstrip()) + 4)
    (recipe / "trainer.py").write_text(trainer.replace(loop, f'{loop}\n{indent}__import__("time").sleep(2.5)', 1))
    job = submit(f"{SHARED}/slow_steps --on slurm:debug --ranks 2 --time 3 {TRAIN}")
    assert "COMPLETED" == job.ends(within_s=500), job.log
    reports = job.reports()
    assert len(reports) >= 2
    assert "done" == reports[-1]["status"], job.log
    for before, after in itertools.pairwise(reports):
        assert before["steps"] == before["stopped"]["saved_step"] == after["began_from"]["step"]
    assert unbroken == reports[-1]["parameters_sha256"]


def test_a_start_that_finishes_no_step_is_the_last_and_has_status_8(submit):
    job = submit(f"data_parallel --on slurm:debug --ranks 2 {TRAIN}")
    wait_until(job.runs, what=lambda: job.log, timeout_s=60)
    job.announce_limit()
    assert "FAILED" == job.ends(), job.log
    assert "ExitCode=8:0" in job.show()
    assert "error[R070]: " in job.log
    assert 1 == len(job.runs())


SCRIPT = """\
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(os.environ["RESULTS"], f"start-{start}-rank-{os.environ['RANK']}").touch()
while start == "0":
    time.sleep(0.1)
"""


@pytest.fixture
def script(slurm4):
    """A script that each host sees: it waits in its first start, and ends by itself in the next."""
    slurm4.cluster.path("launcher", SHARED).joinpath("train.py").write_text(SCRIPT)
    results = slurm4.cluster.path("launcher", SHARED)
    yield f"{SHARED}/train.py", results
    for path in results.glob("start-*"):
        path.unlink()


def test_a_script_gets_sigterm_and_learns_how_often_it_was_started(submit, script):
    path, results = script
    job = submit(f"--requeue --on slurm:debug --nodes 2 --ranks 2 --env RESULTS={SHARED} {path}")
    wait_until(lambda: len(list(results.glob("start-0-*"))) == 2, what=lambda: job.log, timeout_s=60)
    job.announce_limit()
    job.starts_again()
    assert "COMPLETED" == job.ends(), job.log
    assert {f"start-{start}-rank-{rank}" for start in (0, 1) for rank in (0, 1)} == {
        found.name for found in results.glob("start-*")
    }
    assert [("time limit", 9), ("done", 0)] == [(report["status"], report["exit_status"]) for report in job.reports()]


def test_no_value_of_the_user_is_shown_by_slurm_or_in_a_command_line(submit, script, slurm4):
    path, results = script
    job = submit(f"--on slurm:debug --ranks 1 --env RESULTS={SHARED} --env A=hidden-1 {path} -- hidden-2", B="hidden-3")
    wait_until(lambda: list(results.glob("start-0-*")), what=lambda: job.log, timeout_s=60)
    commands = [words for host in slurm4.cluster.hosts for words in slurm4.cluster.pids(host).values()]
    own = [
        words for words in commands if "train.py" not in words
    ]  # the rank itself has the arguments that it was given
    script_of_job = slurm4.run("launcher", ["scontrol", "write", "batch_script", job.number, "-"]).stdout
    assert "" != script_of_job
    assert "hidden" not in job.show() + script_of_job + "".join(own)
    rights = {
        name: (job.folder / name).stat().st_mode & 0o777 for name in ("order.json", "environment.sh", "job.sbatch")
    }
    assert {0o600} == set(rights.values())
    job.ttlaunch(f"stop {job.number} --now")


def test_scancel_ends_the_ranks_and_the_report_says_so(submit, script, slurm4):
    path, results = script
    job = submit(f"--requeue --on slurm:debug --nodes 2 --ranks 2 --env RESULTS={SHARED} {path}")
    wait_until(lambda: len(list(results.glob("start-0-*"))) == 2, what=lambda: job.log, timeout_s=60)
    slurm4.run("launcher", ["scancel", job.number])
    assert "CANCELLED" == job.ends(), job.log
    wait_until(lambda: not left_of(slurm4, job), what=lambda: left_of(slurm4, job), timeout_s=30)
    answer = job.ttlaunch(f"report {job.number}")
    assert f"cancelled by scancel of Slurm job {job.number}" in answer.stdout, (answer, job.log)


def left_of(slurm, job):
    """Processes on the hosts that are neither Slurm's nor sshd."""
    daemons = ("sshd", "munged", "slurmctld", "/usr/sbin/")
    found = [words for host in slurm.cluster.hosts for words in slurm.cluster.pids(host).values()]
    return [words for words in found if not words.startswith(daemons)]


def test_a_run_on_another_host_is_shown_until_it_ends(submit, script):
    path, results = script
    job = submit(f"--on slurm:debug --ranks 1 --env RESULTS={SHARED} {path}")
    wait_until(lambda: list(results.glob("start-0-*")), what=lambda: job.log, timeout_s=60)
    job.announce_limit()
    answer = job.ttlaunch(f"attach {job.number}")
    assert 9 == answer.returncode, answer
    assert "time limit: train on slurm:debug, 1 rank" in answer.stdout
    assert "FAILED" == job.ends()


def test_a_run_that_is_stopped_saves_its_step(submit):
    steps = TRAIN.replace("steps=60", "steps=20000")  # it is not done before it is stopped, however fast the machine is
    job = submit(f"data_parallel --on slurm:debug --ranks 2 {steps}")
    wait_until(lambda: job.step() >= 2, what=lambda: job.log, timeout_s=60)
    assert "running on node" in job.ttlaunch("ps").stdout
    answer = job.ttlaunch(f"stop {job.number}")
    assert 0 == answer.returncode, answer
    [report] = job.reports()
    assert ("terminated", report["steps"]) == (report["status"], report["stopped"]["saved_step"])
    assert report["run_id"] not in job.ttlaunch("ps --format concise").stdout


def test_a_job_that_waits_is_listed_with_its_reason_and_can_be_stopped(submit):
    job = submit("data_parallel --on slurm:closed --ranks 1")
    listed = job.ttlaunch("ps").stdout
    assert f"{job.number}  waiting (PartitionDown)" in " ".join(listed.split(" ")), listed
    answer = job.ttlaunch(f"report {job.number}")
    assert 2 <= answer.returncode <= 5, answer
    assert answer.stderr.startswith(
        f"error[R072]: Slurm job {job.number} has begun no run yet: it is waiting (PartitionDown)"
    )
    assert 0 == job.ttlaunch(f"stop {job.number}").returncode
    assert "CANCELLED" == job.ends(within_s=10)
    assert job.ttlaunch(f"stop {job.number}").stdout.endswith("is not running\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--on slurm:nowhere", "invalid partition specified: nowhere"),
        ("--on slurm:debug --gres gpu:9", "Requested node configuration is not available"),
    ],
)
def test_what_slurm_refuses_is_a_diagnostic_with_its_words_and_leaves_nothing(slurm4, options, words):
    folder = f"{SHARED}/refused"
    slurm4.run("launcher", ["mkdir", "-p", folder])
    command = [sys.executable, "-m", "ttlaunch", "submit", "data_parallel", "--ranks", "1", *options.split()]
    answer = slurm4.run("launcher", command, cwd=folder)
    assert 4 == answer.returncode, answer
    assert answer.stderr.startswith("error[P061]: Slurm refuses the job: ")
    assert words.lower() in answer.stderr.lower()
    assert [] == list(slurm4.cluster.path("launcher", folder).glob("runs/job-*"))
    assert [] == slurm4.queue()


def test_a_folder_that_hosts_do_not_see_is_named_when_the_job_has_failed(slurm4, tmp_path):
    job = Submitted(slurm4, str(tmp_path), "data_parallel --on slurm:debug --ranks 1", {})
    assert "FAILED" == job.ends(), job.log
    answer = job.ttlaunch(f"report {job.number}")
    assert f"error[R072]: Slurm job {job.number} has begun no run, and has ended" in answer.stderr
    assert "does not see" in answer.stderr


def test_clean_removes_the_folder_of_a_job_that_has_ended_with_its_runs_and_of_no_other(submit, script, slurm4):
    path, results = script
    job = submit(f"--requeue --on slurm:debug --ranks 1 --env RESULTS={SHARED} {path}")
    wait_until(lambda: list(results.glob("start-0-*")), what=lambda: job.log, timeout_s=60)
    job.announce_limit()
    wait_until(lambda: job.state == "PENDING", what=lambda: job.log, timeout_s=60)
    [run] = job.runs()
    job.ttlaunch("runs clean --yes")
    assert (True, True) == (run.exists(), job.folder.exists())
    job.ttlaunch(f"stop {job.number}")
    assert "CANCELLED" == job.ends(within_s=30)
    answer = job.ttlaunch("runs clean --yes")
    assert (0, False, False) == (answer.returncode, run.exists(), job.folder.exists()), answer


def test_a_script_outside_of_the_project_is_run_as_it_is_and_a_warning_says_so(submit, slurm4):
    shared = slurm4.cluster.path("launcher", SHARED)
    (shared / "elsewhere").mkdir()
    (shared / "elsewhere/outside.py").write_text("print('was here')\n")
    for path in (f"{SHARED}/elsewhere/outside.py", "../elsewhere/outside.py"):
        job = submit(f"--on slurm:debug --ranks 1 {path}")
        assert "warning[P073]: `/root/shared/elsewhere/outside.py` is not in the project" in job.stderr
        assert "COMPLETED" == job.ends(), job.log
        assert "was here" in job.log


def test_submitting_to_a_partition_that_is_down_is_warned_of(submit):
    job = submit("data_parallel --on slurm:closed --ranks 1")
    assert job.stderr.startswith(f"warning[H046]: Slurm job {job.number} stays in the queue until somebody changes it")
    assert "the partition is down (PartitionDown)" in job.stderr
    job.ttlaunch(f"stop {job.number}")
