"""The shim: a rank's environment, its output byte for byte, and the record of its end."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.agent import SHIM
from ttlaunch.agent.shim import rank_environment

PACKAGE = Path(contract.__file__).parent
NAMES = {"launcher": "mpirun", "rank_variables": ["FIRST_RANK", "SOME_RANK"], "network_variables": ["SOME_NETWORKS"]}
GARBAGE = bytes(range(256)) * 3


def plan_for(folder, command, **changes):
    row = {"rank": 0, "local_rank": 0, "host": "localhost", "role": "worker", "environment": {}}
    return {
        "format": contract.PLAN_FORMAT,
        "recipe": None,
        "rank_command": command,
        "working_folder": str(folder),
        "environment": {},
        "managed": [],
        "engine": {"name": "Some Engine 1.0", "names": NAMES},
        "world_size": 2,
        "ranks": [row, {**row, "rank": 1, "local_rank": 1, "role": "optimizer"}],
        **changes,
    }


class Ended:
    """A shim that has ended, and what it wrote."""

    def __init__(self, folder, process, rank):
        self.folder, self.status, self.rank = folder, process.returncode, rank
        self.stdout, self.stderr = process.stdout, process.stderr

    def written(self, name):
        return (self.folder / name(self.rank)).read_bytes()

    @property
    def exit(self):
        return json.loads(self.written(contract.exit_file))


@pytest.fixture
def shim(here):
    """`shim(program)` runs a Python program as rank 0 under the shim, in an interpreter without site-packages."""

    def run(program, *, rank=0, command=None, environment=None, plan=None, pass_fds=()):
        (here / "program.py").write_text(program)
        plan = plan or plan_for(here, command or [sys.executable, str(here / "program.py")])
        (here / contract.PLAN_FILE).write_text(json.dumps(plan))
        process = subprocess.run(
            [sys.executable, "-I", "-S", SHIM, contract.PLAN_FILE],
            env={**os.environ, "SOME_RANK": str(rank), **(environment or {})},
            cwd=here,
            capture_output=True,
            timeout=30,
            check=False,
            pass_fds=pass_fds,
        )
        return Ended(here, process, rank)

    return run


def write(text, descriptor=1):
    """A program that writes bytes as they are."""
    return f"import os\ndata = {text!r}\nwhile data:\n    data = data[os.write({descriptor}, data):]\n"


@pytest.mark.parametrize(
    "data",
    [GARBAGE, b"no line end", b"\xe2\x82", b"x" * 60_000 + b"\n", b"", b"\n\n"],
    ids=["garbage", "no-line-end", "half-a-character", "a-line-of-60-kB", "nothing", "empty-lines"],
)
@pytest.mark.parametrize("stream", [1, 2], ids=["stdout", "stderr"])
def test_output_is_kept_byte_for_byte_and_passed_on_with_the_ranks_name(shim, data, stream):
    ended = shim(write(data, stream))
    name = contract.stdout_file if stream == 1 else contract.stderr_file
    assert ended.written(name) == data
    lines = data.split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    assert (ended.stdout if stream == 1 else ended.stderr) == b"".join(b"rank 0 worker | " + x + b"\n" for x in lines)
    assert ended.status == 0


def test_a_line_without_end_is_passed_on_in_pieces_and_kept_whole(shim):
    data = b"x" * 5_000_000
    ended = shim(write(data))
    assert ended.written(contract.stdout_file) == data
    pieces = ended.stdout.splitlines()
    assert all(piece.startswith(b"rank 0 worker | ") and len(piece) < 200_000 for piece in pieces)
    assert b"".join(piece.removeprefix(b"rank 0 worker | ") for piece in pieces) == data


def test_a_child_that_forks_twice_and_forgets_its_environment_is_ended(shim, here):
    escape = """
import os, time
reader, writer = os.pipe()
if not os.fork():
    os.setsid()
    if pid := os.fork():
        os._exit(0)
    os.write(writer, b"%d" % os.getpid())
    os.execvpe("sleep", ["sleep", "300"], {"PATH": os.environ["PATH"]})
print(os.read(reader, 20).decode())
"""
    ended = shim(escape)
    pid = int(ended.written(contract.stdout_file))
    assert ended.status == 0
    assert not Path("/proc", str(pid)).exists()


def test_a_full_disk_stops_the_log_and_not_the_rank(shim, here):
    (here / contract.LOGS_DIR).mkdir(exist_ok=True)
    (here / contract.stdout_file(0)).symlink_to("/dev/full")
    ended = shim(write(b"y\n" * 100_000))
    assert ended.status == 0
    assert b"rank-0.stdout cannot be written: No space left on device" in ended.stderr
    assert ended.stdout.count(b"rank 0 worker | y\n") == 100_000
    assert ended.exit["unkept_output"] == {"stdout": 200_000}
    assert ended.exit["unkept_reason"] == "No space left on device"


def test_of_output_that_is_kept_nothing_is_missing(shim):
    ended = shim(write(b"z" * 100))
    assert (ended.exit["unkept_output"], ended.exit["unkept_reason"]) == ({}, None)


def test_a_status_is_passed_on_and_recorded(shim):
    ended = shim("raise SystemExit(7)")
    assert ended.status == 7
    record = ended.exit
    assert (record["rank"], record["status"], record["signal"], record["left_early"]) == (0, 7, None, False)
    assert record["started"] <= record["time"]
    assert record["peak_memory_bytes"] > 1_000_000


def test_a_signal_is_recorded_as_a_signal(shim):
    ended = shim("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert ended.status == 128 + signal.SIGSEGV
    assert (ended.exit["status"], ended.exit["signal"]) == (None, signal.SIGSEGV)


def test_a_kill_by_hand_is_none_of_the_kernels(shim):
    record = shim("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").exit
    assert (record["signal"], record["oom_kills"]) == (signal.SIGKILL, 0)
    assert record["memory_limit_bytes"] > record["peak_memory_bytes"] > 1_000_000


def test_a_recipe_rank_that_leaves_with_status_0_too_early_is_a_failure(shim, here):
    command = [sys.executable, str(here / "program.py")]
    ended = shim("pass", plan=plan_for(here, command, recipe={"name": "mine"}))
    assert (ended.status, ended.exit["status"], ended.exit["left_early"]) == (1, 0, True)


def test_a_recipe_rank_that_says_it_is_done_has_not_left_early(shim, here):
    command = [sys.executable, str(here / "program.py")]
    text = f'open({contract.progress_file(0)!r}, \'a\').write(\'{{"kind": "done", "time": 1}}\\n\')'
    ended = shim(text, plan=plan_for(here, command, recipe={"name": "mine"}))
    assert (ended.status, ended.exit["left_early"]) == (0, False)


def test_the_start_is_recorded_with_both_process_ids(shim):
    ended = shim("import os; print(os.getpid(), os.getppid())")
    record = json.loads(ended.written(contract.progress_file))
    pids = ended.written(contract.stdout_file).split()
    assert [record["pid"], record["shim_pid"]] == [int(pid) for pid in pids]
    assert record["kind"] == contract.KIND_STARTED


def test_a_missing_interpreter_is_recorded(shim):
    ended = shim("", command=["/no/such/python", "x.py"])
    assert ended.status == 70
    assert ended.stderr == b"rank 0 cannot be started: No such file or directory: /no/such/python\n"
    assert ended.exit["start_error"] == "No such file or directory: /no/such/python"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"#!/no/such/sh -e\n", "there is no `/no/such/sh`, which the first line of ./work names"),
        (b"#!/bin/sh\r\n", "there is no `/bin/sh`, which the first line of ./work names; the line ends as on Windows"),
        (b"echo 1\n", "./work is no program for this machine, and no script whose first line names its interpreter"),
    ],
)
def test_a_script_whose_interpreter_is_missing_is_not_said_to_be_missing_itself(shim, here, content, said):
    (here / "work").write_bytes(content)
    (here / "work").chmod(0o755)
    ended = shim("", command=["./work"])
    assert (ended.status, ended.exit["start_error"].startswith(said)) == (70, True), ended.exit["start_error"]


def test_a_missing_working_folder_is_recorded(shim, here):
    plan = plan_for(here, [sys.executable, "-c", "pass"], working_folder="/no/such/folder")
    ended = shim("", plan=plan)
    assert ended.exit["start_error"] == "No such file or directory: /no/such/folder"


def test_a_plan_of_another_format_is_refused(shim, here):
    ended = shim("", plan=plan_for(here, ["true"], format=contract.PLAN_FORMAT + 1))
    assert ended.status == 70
    expected = f"ttlaunch shim: plan format {contract.PLAN_FORMAT + 1} is not {contract.PLAN_FORMAT}; "
    assert ended.stderr.decode() == expected + "another version wrote it\n"


def test_a_rank_that_the_plan_does_not_have_is_refused(shim):
    ended = shim("", rank=5)
    assert (ended.status, ended.stderr) == (70, b"ttlaunch shim: mpirun started rank 5, but the plan has 2 ranks\n")


def test_a_shim_without_an_mpi_launcher_says_so(here):
    (here / contract.PLAN_FILE).write_text(json.dumps(plan_for(here, ["true"])))
    process = subprocess.run(
        [sys.executable, "-I", "-S", SHIM, contract.PLAN_FILE],
        env=dict(os.environ),
        cwd=here,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    said = "ttlaunch shim: no MPI launcher said which rank this is; start it with mpirun\n"
    assert (process.returncode, process.stderr) == (70, said)


def test_the_plan_says_in_which_variables_the_engine_names_the_rank(shim):
    ended = shim("", rank=0, environment={"FIRST_RANK": "1"})
    assert json.loads((ended.folder / contract.exit_file(1)).read_text())["status"] == 0
    assert not (ended.folder / contract.exit_file(0)).exists()


def test_a_plan_that_does_not_say_so_is_refused(shim, here):
    ended = shim("", plan=plan_for(here, ["true"], engine={"name": "Some Engine 1.0"}))
    said = "ttlaunch shim: the plan does not say how its engine names ranks; another version wrote it\n"
    assert (ended.status, ended.stderr.decode()) == (70, said)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"SOME_NETWORKS": "10.0.0.0/24"}, "10.0.0.0/24"),
        ({"SOME_NETWORKS": "10.0.0.0/24", "TTLAUNCH_NETWORKS": "192.168.0.0/16"}, "10.0.0.0/24"),
        ({"TTLAUNCH_NETWORKS": "192.168.0.0/16"}, None),
        ({}, None),
    ],
    ids=["named", "named-over-an-outer-runs", "only-an-outer-runs", "none"],
)
def test_a_rank_is_told_the_networks_that_the_engine_names(shim, given, seen):
    ended = shim("import os; print(os.environ.get('TTLAUNCH_NETWORKS'))", environment=given)
    assert f"{seen}\n" == ended.written(contract.stdout_file).decode()


def test_the_environment_is_whole_before_the_rank_starts(shim, here):
    plan = plan_for(here, [sys.executable, str(here / "program.py")])
    plan["environment"] = {"SHARED": "plan", "BOTH": "plan"}
    plan["ranks"][1]["environment"] = {"BOTH": "row", "TT_MESH_ID": "3"}
    plan["managed"] = ["TT_MESH_ID", "TT_VISIBLE_DEVICES"]
    inherited = {"TT_VISIBLE_DEVICES": "0", "OWN": "host", contract.ENV_RUN_ID: "tonight"}
    ended = shim("import os, json; print(json.dumps(dict(os.environ)))", rank=1, plan=plan, environment=inherited)
    seen = json.loads(ended.written(contract.stdout_file))
    assert "TT_VISIBLE_DEVICES" not in seen
    ours = {name: value for name, value in seen.items() if name.startswith(contract.PREFIX)}
    assert ours == {
        contract.ENV_RUN_ID: "tonight",
        contract.ENV_RUN_DIR: str(here),
        contract.ENV_PLAN: str(here / contract.PLAN_FILE),
        contract.ENV_RANK: "1",
        contract.ENV_LOCAL_RANK: "1",
        contract.ENV_WORLD_SIZE: "2",
        contract.ENV_ROLE: "optimizer",
        contract.ENV_HOST: "localhost",
    }
    assert [seen[name] for name in ("SHARED", "BOTH", "TT_MESH_ID", "OWN")] == ["plan", "row", "3", "host"]


def test_a_crash_in_compiled_code_tells_its_line_unless_the_user_wants_otherwise(shim):
    crash = "import ctypes\n\nctypes.string_at(0)\n"
    log = shim(crash).written(contract.stderr_file).decode()
    assert log.startswith("Fatal Python error: Segmentation fault\n")
    assert 'program.py", line 3 in <module>' in log
    assert shim(crash, environment={"PYTHONFAULTHANDLER": ""}).written(contract.stderr_file) == b""


def test_nothing_of_one_rank_reaches_another(here):
    plan = plan_for(here, ["true"], managed=["TT_VISIBLE_DEVICES"])
    plan["ranks"][0]["environment"] = {"TT_VISIBLE_DEVICES": "0"}
    first = rank_environment(plan, plan["ranks"][0], {}, run_folder="runs/x", plan_path="plan.json")
    second = rank_environment(plan, plan["ranks"][1], first, run_folder="runs/x", plan_path="plan.json")
    assert first["TT_VISIBLE_DEVICES"] == "0"
    assert "TT_VISIBLE_DEVICES" not in second


def test_a_rank_inherits_the_descriptors_of_its_launcher(shim):
    reader, writer = os.pipe()
    try:
        shim(f"import os; os.write({writer}, b'through')", pass_fds=(writer,))
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_rank_reads_nothing_from_the_terminal(shim):
    assert shim("import sys; print(repr(sys.stdin.read()))").written(contract.stdout_file) == b"''\n"


@pytest.mark.parametrize(
    "path", [PACKAGE / "contract.py", *sorted((PACKAGE / "agent").glob("*.py"))], ids=lambda path: path.name
)
def test_what_runs_on_a_host_is_python_3_9_and_imports_nothing_else(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
            if node.module == "ttlaunch":
                assert [alias.name for alias in node.names] == ["contract"]
        assert not isinstance(node, ast.Match)
    assert imported <= set(sys.stdlib_module_names) | {"ttlaunch"}


def test_the_modules_of_the_shim_need_no_site_packages(here):
    """`ttlaunch/__init__.py` is imported on the way, so it counts too."""
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import ttlaunch.agent.shim; print(len(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True, timeout=30)
    assert int(process.stdout) < 120, "a shim that imports much starts late"
