"""`ttlaunch plan`: what it shows, and files that start the plan by hand from anywhere."""

import contextlib
import json
import os
import platform
import signal
import subprocess

import pytest

from tests.running.conftest import wait_until

NASTY = 'it\'s a $HOME of "quotes"; and `ticks`'
LAB = "--on 5loudboxes --set multihost_config.num_workers=3"


def test_the_plan_names_ranks_roles_hosts_meshes_flows_and_links(ttlaunch, golden, portable):
    answer = ttlaunch(f"plan hierarchical_parallel {LAB}")
    assert (answer.status, answer.stderr) == (0, "")
    lines = [line.rstrip() for line in answer.stdout.splitlines() if not line.startswith("plan  ")]
    golden("plan-5loudboxes.txt", portable("\n".join(lines) + "\n"))


def test_concise_is_one_line_for_each_rank(ttlaunch):
    answer = ttlaunch(f"plan hierarchical_parallel {LAB} --format concise")
    assert answer.stdout == (
        "0\tworker\tloudbox-01\t0\t1\n"
        "1\tworker\tloudbox-02\t0\t0\n"
        "2\tworker\tloudbox-03\t0\t2\n"
        "3\taggregator\tloudbox-04\t0\t3\n"
        "4\toptimizer\tloudbox-05\t0\t4\n"
    )


def test_one_rank_on_one_host_is_said_in_the_singular(ttlaunch):
    first_line = ttlaunch("plan fabric_minimal -n 1").stdout.splitlines()[0]
    assert first_line.startswith("fabric_minimal (all) on local: 1 rank on 1 host, Open MPI ")


@pytest.mark.parametrize("form", ["full", "concise", "json"])
def test_a_dry_run_prints_the_plan_and_makes_nothing(ttlaunch, here, form):
    planned = ttlaunch(f"plan hierarchical_parallel --format {form}")
    assert ttlaunch(f"run hierarchical_parallel --dry-run --format {form}") == planned
    assert planned.status == 0
    assert list(here.iterdir()) == []


def test_json_is_the_plan_file_with_remarks(ttlaunch, here):
    answer = ttlaunch("plan hierarchical_parallel --format json --out launch")
    assert json.loads(answer.stdout) == {
        **json.loads((here / "launch/plan.json").read_text()),
        "schema": "ttlaunch.plan/1",
        "remarks": [],
        "diagnostics": [],
    }
    names = sorted(path.name for path in (here / "launch").iterdir())
    assert names == ["command.sh", "hosts.txt", "plan.json", "rankfile.txt"]


def test_a_place_that_cannot_be_written_is_one_line(ttlaunch, here):
    (here / "taken").touch()
    answer = ttlaunch("plan fabric_minimal --out taken")
    assert (answer.status, answer.stderr) == (2, "error[P032]: taken cannot be written: file exists\n\n")


def test_warnings_do_not_keep_a_plan_from_being_made(ttlaunch):
    answer = ttlaunch("plan hierarchical_parallel --set device_config.enable_ddp=true --format concise")
    assert answer.status == 0
    assert answer.stderr.startswith("--set:1:26: warning[C020]: ")
    assert len(answer.stdout.splitlines()) == 4


def test_a_worker_has_a_rank_for_each_of_its_devices(ttlaunch):
    """A6."""
    line = "plan hierarchical_parallel --set device_config.enable_ddp=true --set device_config.mesh_shape=[1,2]"
    answer = ttlaunch(line + " --format concise")
    assert (answer.status, answer.stderr) == (0, "")
    roles = [row.split()[1] for row in answer.stdout.splitlines()]
    assert ["worker"] * 4 + ["aggregator", "optimizer"] == roles
    answer = ttlaunch(line + " --ranks 8")
    assert "note  `--ranks 8` sets `multihost_config.num_workers=3`" in answer.stdout  # with three tiers
    answer = ttlaunch(line + " --ranks 9")
    assert answer.stdout.startswith("hierarchical_parallel (two_tier) on local: 9 ranks")  # not three ranks and a half


SHARES = """\
import os, pathlib, time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "_segment." in line]
folders = {os.path.dirname(path) for path in mapped}
rank = MPI.COMM_WORLD.rank
pathlib.Path(f"part-{rank}").write_text(" ".join(sorted(folders)))
os.replace(f"part-{rank}", f"up-{rank}")
time.sleep(600)
"""
"""Says in which folders its MPI has mapped the memory that ranks of one machine share."""


@pytest.mark.mpi
@pytest.mark.parametrize("folder", ["launch", NASTY], ids=["plain", "nasty"])
def test_the_written_command_starts_the_plan_from_another_folder(ttlaunch, here, folder):
    (here / "else where").mkdir()
    answer = ttlaunch(["plan", "fabric_minimal", "-n", "2", "--set", "all_reduce_config.repeats=1", "--out", folder])
    assert answer.stdout.splitlines()[-1].startswith("wrote 4 files; start it with: sh ")
    process = subprocess.run(
        ["sh", here / folder / "command.sh"],
        cwd=here / "else where",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    said = "rank 0 peer | the sum over 2 ranks is 3 in all 4000000 places, on every rank"
    assert process.stdout.startswith(said)
    assert (here / folder / "records/rank-1.exit.json").is_file()


@pytest.mark.mpi
def test_the_hint_after_writing_can_be_pasted(ttlaunch, here):
    (here / "work.py").write_text("print('hello')\n")
    hint = ttlaunch(["plan", "work.py", "--out", NASTY]).stdout.splitlines()[-1].partition("start it with: ")[2]
    answer = subprocess.run(["sh", "-c", hint], cwd=here, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stdout) == (0, "rank 0 rank | hello\n"), answer.stderr


@pytest.mark.mpi
def test_the_written_command_fails_when_a_rank_does(ttlaunch, here):
    (here / "work.py").write_text("raise SystemExit(3)\n")
    ttlaunch("plan work.py --out launch")
    answer = subprocess.run(["sh", "launch/command.sh"], capture_output=True, timeout=60, check=False, env=os.environ)
    assert answer.returncode == 3


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_written_command_leaves_no_shared_memory_when_it_is_ended(ttlaunch, here, number):
    """As Ctrl-C does, the signal reaches everything that the terminal runs."""
    (here / "work.py").write_text(SHARES)
    ttlaunch("plan work.py -n 2 --out launch")
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(here)}
    process = subprocess.Popen(
        ["sh", "launch/command.sh"], env=environment, start_new_session=True, stdout=-1, stderr=-1
    )
    try:
        wait_until(lambda: len(list(here.glob("up-*"))) == 2, within_s=60, what="both ranks")
        [scratch] = here.glob("ttl-*")
        assert list(scratch.rglob("*_segment.*"))
        assert {path.read_text() for path in here.glob("up-*")} == {str(scratch)}
        os.killpg(process.pid, number)
        process.communicate(timeout=30)  # until the last process that holds its output has ended
        assert [] == list(here.glob("ttl-*"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_two_names_of_this_machine_are_refused_before_mpirun_mixes_them_up(ttlaunch, here, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "launcher")
    (here / "hosts.txt").write_text("localhost slots=1\nlauncher slots=1\n")
    answer = ttlaunch("plan fabric_minimal --hostfile hosts.txt -n 2")
    assert (
        4,
        """\
error[H017]: `localhost` and `launcher` are the same machine, `launcher`
 --> hosts.txt:2:1
  |
2 | launcher slots=1
  | ^^^^^^^^ the same machine as localhost
 --> hosts.txt:1:1
  |
1 | localhost slots=1
  | --------- its other name
  = note: each of them means the machine on which ttlaunch runs

hint: keep one line, with the slots of both""",
    ) == (answer.status, answer.stderr.rstrip())


def test_an_empty_name_is_refused_as_empty(ttlaunch):
    recipe, configuration = ttlaunch(["plan", ""]), ttlaunch(["plan", "fabric_minimal", "--on", ""])
    assert "error[P001]: the name of the recipe is empty" == recipe.stderr.splitlines()[0]
    assert "error[P005]: the name of the configuration is empty" == configuration.stderr.splitlines()[0]
    assert (2, 2) == (recipe.status, configuration.status)


def test_the_plan_says_who_talks_to_whom_in_a_grid_of_stages(ttlaunch):
    """Only flows that the configuration makes: replicas average, chunks and shared matrices close the chain."""
    key = "multihost_config.pipeline_parallel_config"
    plain = ttlaunch("plan pipeline_parallel").stdout
    assert ["flow  stage → next stage"] == [line for line in plain.splitlines() if line.startswith("flow")]
    options = f"--set {key}.replicas=2 --set {key}.schedule=auto --set {key}.chunks_per_rank=2"
    answer = ttlaunch(f"plan pipeline_parallel --ranks 4 {options}")
    assert [
        "flow  stage → next stage",
        "flow  first stage ↔ last stage of a row",
        "flow  stage ↔ every other stage of its row",
        "flow  stage ↔ stage at its place in other rows",
    ] == [line for line in answer.stdout.splitlines() if line.startswith("flow")]
    tied = ttlaunch("plan pipeline_parallel --set transformer_config.tie_embeddings=true").stdout
    assert "first stage ↔ last stage" in tied


@pytest.mark.parametrize(
    ("words", "steps"), [("--trace", "20"), ("--trace --trace-steps 3", "3"), ("--trace-steps 3", "3")]
)
def test_steps_to_trace_are_traced_with_or_without_saying_so_twice(ttlaunch, words, steps):
    plan = json.loads(ttlaunch(f"run hierarchical_parallel --dry-run --format json {words}").stdout)
    assert steps == plan["environment"]["TTLAUNCH_TRACE_STEPS"]
    plain = json.loads(ttlaunch("run hierarchical_parallel --dry-run --format json").stdout)
    assert "TTLAUNCH_TRACE_STEPS" not in plain["environment"]
