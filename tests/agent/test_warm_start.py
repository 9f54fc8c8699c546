"""Ranks that are forks of a process that has imported torch: as a process started anew sees itself, and where that cannot be."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.running.conftest import StartedRun, wait_until
from ttlaunch import contract

pytestmark = pytest.mark.mpi

LOOK = """
import json, os, random, secrets, signal, sys, tempfile, uuid
loaded = "torch" in sys.modules
import multiprocessing, numpy, torch
with open("/proc/self/stat") as file:
    parent = file.read().rpartition(")")[2].split()[1]
class Own: pass
handlers = {one.name: repr(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN)}
def shown(name):
    with open(f"/proc/self/{name}") as file:
        return file.read()
descriptors = [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]
own = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": repr(sys.flags), "xoptions": sys._xoptions, "path": sys.path, "name": __name__,
    "file": __file__, "package": __package__, "spec": repr(__spec__), "cwd": os.getcwd(), "main": Own.__module__ + repr(sys.modules["__main__"]),
    "handlers": handlers, "mask": repr(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "umask": os.umask(0), "comm": shown("comm"), "cmdline": shown("cmdline"),
    "descriptors": sorted(int(number) for number in descriptors), "stdin": os.readlink("/proc/self/fd/0"),
    "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.isatty()],
    "variables": dict(os.environ), "shown": dict(part.split("=", 1) for part in shown("environ").split("\\0") if "=" in part),
    "threads": torch.get_num_threads(), "group_is_parents": os.getpgid(0) == os.getpgid(int(parent)), "path_hooks": [type(one).__name__ for one in sys.meta_path],
}
unseeded_rand = torch.rand(8).tolist()
torch.manual_seed(7)
drawn = [random.random(), numpy.random.rand(), secrets.token_hex(), str(uuid.uuid4()), str(uuid.uuid1()), next(tempfile._get_candidate_names()), multiprocessing.current_process().authkey.hex()]
unseeded = torch.Generator().initial_seed()
json.dump({"own": own, "drawn": drawn, "loaded": loaded, "unseeded": unseeded_rand, "dropout": torch.nn.functional.dropout(torch.ones(64)).tolist()}, open("look-" + os.environ["RANK"], "w"))
"""
VARYING = ("TORCHELASTIC_RUN_ID", "TTLAUNCH_", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT")


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    """What two ranks found of themselves, started by themselves (False) and forked (True)."""
    found = {}
    for warm in (False, True):
        folder = tmp_path_factory.mktemp("warm" if warm else "cold")
        (folder / "look.py").write_text(LOOK)
        options = ["--warm"] if warm else []
        run = StartedRun(
            folder,
            [*options, "-n", "2", "--", sys.executable, "-X", "faulthandler", "-W", "ignore", "look.py", "a", "b"],
        )
        try:
            assert 0 == run.ends(within_s=120), run.stderr
        finally:
            run.close()
        texts = [(folder / f"look-{rank}").read_text().replace(str(folder), "FOLDER") for rank in (0, 1)]
        found[warm] = [json.loads(text) for text in texts]
    return found


@pytest.fixture
def warm(here):
    """`warm(text, *options)` starts a script of two ranks with `--warm`, unless `options` begin with False."""
    runs = []

    def start(text, *options, ranks=2, is_warm=True):
        (here / "work.py").write_text(text)
        chosen = ["--warm"] if is_warm else []
        runs.append(StartedRun(here, [*chosen, "-n", str(ranks), *options, "work.py"]))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_a_forked_rank_finds_torch_imported_when_its_script_begins(looks):
    assert ([False, False], [True, True]) == tuple([look["loaded"] for look in looks[warm]] for warm in (False, True))


def test_a_forked_rank_sees_itself_as_a_process_started_anew(looks):
    for cold, warm in zip(looks[False], looks[True], strict=True):
        expected, found = (dict(look["own"]) for look in (cold, warm))
        for kind in ("variables", "shown"):
            for look in (expected, found):
                look[kind] = {name: value for name, value in look[kind].items() if not name.startswith(VARYING)}
        assert expected == found


def test_proc_shows_the_variables_of_a_forked_rank_itself(looks):
    shown = [look["own"]["shown"] for look in looks[True]]
    assert ["0", "1"] == [variables[contract.ENV_RANK] for variables in shown]
    assert contract.ENV_WARM not in {*shown[0], *shown[1]}


def test_what_forked_ranks_draw_at_random_differs_and_what_they_seed_is_the_same_as_in_others(looks):
    first, second = (look["drawn"] for look in looks[True])
    assert [] == [one for one, other in zip(first, second, strict=True) if one == other]
    assert 1 == len({json.dumps(look["dropout"]) for kind in looks.values() for look in kind})


def test_unseeded_forked_ranks_have_other_weights_than_each_other(looks):
    first, second = (look["unseeded"] for look in looks[True])
    assert first != second


FAULTS = {
    "exception": "raise ValueError('boom')",
    "exit": "sys.exit(3)",
    "left": "os._exit(0)",
    "killed": "os.kill(os.getpid(), 9)",
    "crash": "os.kill(os.getpid(), 11)",
    "terminated": "os.kill(os.getpid(), 15)",
    "atexit": "import atexit; atexit.register(lambda: print('left by atexit')); sys.exit('end')",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_forked_rank_that_fails_is_reported_as_any_other(warm, here, fault):
    text = (
        f"import os, sys, time\nif os.environ['RANK'] == '1': {FAULTS[fault]}\nif {fault != 'left'}: time.sleep(60)\n"
    )
    ends = []
    for is_warm in (False, True):
        run = warm(text, is_warm=is_warm)
        status = run.ends(within_s=60)
        failure = run.report["failure"] or {}
        kept = [failure.get(name) for name in ("code", "class", "rank", "message", "file", "line")]
        exits = json.loads((run.run_folder / contract.exit_file(1)).read_text())
        printed = (run.run_folder / contract.stdout_file(1)).read_text()
        trace = [
            line
            for line in (run.run_folder / contract.stderr_file(1)).read_text().splitlines()
            if "Thread 0x" not in line
        ]
        ends.append((status, kept, exits["status"], exits["signal"], printed, trace if fault != "crash" else trace[:1]))
        for folder in here.glob("runs/*"):
            folder.rename(here / f"kept-{is_warm}-{folder.name.lstrip('.')}")
    assert ends[0] == ends[1]


def test_a_forked_rank_that_hangs_is_reported_with_its_line(warm):
    run = warm(
        "import os, time\nprint('up', flush=True)\nif os.environ['RANK'] == '1':\n    time.sleep(600)\ntime.sleep(600)\n",
        "--hang-timeout",
        "3",
    )
    assert contract.STATUS_HUNG == run.ends(within_s=60)
    assert "work.py:4" in run.stderr, run.stderr


LEAVES = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.execve('/bin/sleep', ['sleep', '600'], {})
open('up-' + os.environ['RANK'], 'w').write(str(os.getpid()))
time.sleep(600)
"""
"""Each rank has a child in a session of its own, without variables."""


@pytest.mark.parametrize(
    ("victim", "code", "rank", "cause"),
    [
        ("supervisor", None, None, None),
        ("warm process", "R008", None, "start_ranks was killed by SIGKILL; no rank had failed"),
        ("shim", "R006", 1, "was lost: its shim was killed from outside"),
    ],
)
def test_whoever_of_a_warm_run_is_killed_nothing_is_left_and_the_culprit_is_named(warm, victim, code, rank, cause):
    run = warm(LEAVES)
    ranks = [int(run.wait_for_file(f"up-{rank}")) for rank in (0, 1)]
    daemons = [int(pid) for rank in ranks for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()]
    shims = [parent_of(rank) for rank in ranks]
    assert 2 == len(daemons)
    assert {run.mpirun()} == {parent_of(shim) for shim in shims}
    assert {*ranks, *shims, run.mpirun()} <= {*run.processes()}, "they are found by their variables"
    os.kill({"supervisor": run.supervisor(), "warm process": run.mpirun(), "shim": shims[1]}[victim], signal.SIGKILL)
    assert run.ends(within_s=60) != 0
    if code is not None:
        failure = run.report["failure"]
        assert (code, rank, cause) == tuple(failure[name] for name in ("code", "rank", "cause"))
    gone = lambda: not run.processes() and not any(Path(f"/proc/{pid}").exists() for pid in (*ranks, *daemons))  # noqa: E731
    wait_until(gone, within_s=60, what="nothing is left")


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_forked_rank_that_is_asked_to_stop_has_its_grace_period(warm, here):
    text = "import os, signal, sys, time\ndef stop(*_):\n    open('told-' + os.environ['RANK'], 'w').write('x')\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, stop)\nopen('up-' + os.environ['RANK'], 'w').write('x')\ntime.sleep(600)\n"
    run = warm(text)
    [run.wait_for_file(f"up-{rank}") for rank in (0, 1)]
    run.process.send_signal(signal.SIGINT)
    assert contract.STATUS_INTERRUPTED == run.ends(within_s=40)
    assert ["told-0", "told-1"] == sorted(path.name for path in here.glob("told-*"))


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        (["--env", "OPENBLAS_NUM_THREADS=2"], "work.py", "importing torch starts further threads here (1)"),
        ([], "random.py", "`random` beside the program is a name of a module that torch imports"),
        (["--", sys.executable, "-E", "code/work.py"], "work.py", "Python's option `-E` keeps it from starting ranks"),
    ],
)
def test_ranks_start_by_themselves_where_a_fork_would_differ_and_the_user_is_told_once(here, options, name, reason):
    (here / "code").mkdir()  # the current folder may be on the path of modules, and then torch imports files there
    (here / "code/work.py").write_text("import sys; print('torch' in sys.modules)")
    (here / "code" / name).touch()
    run = StartedRun(here, ["--warm", "-n", "2", *options, *(["code/work.py"] if "--" not in options else [])])
    try:
        assert 0 == run.ends(within_s=60), run.stderr
    finally:
        run.close()
    assert 1 == (run.stdout + run.stderr).count(f"`--warm`: each rank starts by itself, because {reason}")
    assert ["False\n", "False\n"] == [(run.run_folder / contract.stdout_file(rank)).read_text() for rank in (0, 1)]


def test_a_module_and_code_on_the_command_line_are_run_by_forked_ranks(here):
    (here / "work").mkdir()
    (here / "work/__main__.py").write_text(
        "import sys; print(__package__, __name__, sys.path[0] == sys.argv[1], 'torch' in sys.modules)"
    )
    for command, expected in (
        (["-m", "work", str(here)], "work __main__ True True\n"),
        (["-u", "-c", "import sys; print(sys.argv, 'torch' in sys.modules)", "x"], "['-c', 'x'] True\n"),
    ):
        run = StartedRun(here, ["--warm", "-n", "2", "--", sys.executable, *command])
        try:
            assert 0 == run.ends(within_s=60), run.stderr
            assert [expected] * 2 == [(run.run_folder / contract.stdout_file(rank)).read_text() for rank in (0, 1)]
        finally:
            run.close()
        run.run_folder.rename(here / f"kept-{len(command)}")
