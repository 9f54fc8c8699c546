"""`import ttlaunch`: the use cases as functions that neither print, nor end, nor touch what is the caller's."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ttlaunch
from ttlaunch import contract
from ttlaunch.agent.run_processes import processes_of_runs
from ttlaunch.app.execute import RunOptions
from ttlaunch.app.order import checked_options, spec_of
from ttlaunch.app.spawn import spawn_supervisor

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
DEADLINE_S = 60.0
SMALL = {"training_config.steps": 12, "transformer_config.num_blocks": 1}


@pytest.fixture
def command_line(ttlaunch):
    """The command line itself; the name `ttlaunch` means the library here."""
    return ttlaunch


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def processes_of(run_id):
    return [pid for pid, found in processes_of_runs() if found == run_id]


# What is imported, and what tools see.


def test_importing_it_costs_a_shim_nothing():
    code = "import sys; before = set(sys.modules); import ttlaunch; print(sorted(set(sys.modules) - before))"
    home = str(Path(ttlaunch.__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {home!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "['ttlaunch']\n" == found.stdout


def test_every_name_is_there_and_listed():
    assert sorted(ttlaunch.__all__) == dir(ttlaunch)
    for name in ttlaunch.__all__:
        assert getattr(ttlaunch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        ttlaunch.runn  # noqa: B018 - that it raises is what is tested


@pytest.mark.slow
def test_type_checkers_see_what_each_name_is(tmp_path):
    (tmp_path / "use.py").write_text(
        "import ttlaunch\n"
        "report = ttlaunch.run('zero', set={'training_config.steps': 3}, grace=1.0)\n"
        "reveal_type(report)\n"
        "reveal_type(ttlaunch.start('zero').logs(follow=True))\n"
        "reveal_type(ttlaunch.plan('zero').ranks)\n"
        "ttlaunch.run('zero', gracee=1.0)\n"
    )
    ours = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]  # else, a minute
    words = [sys.executable, "-m", "mypy", "--strict", *ours, "use.py"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert 'Revealed type is "ttlaunch.app.report.Report"' in found
    assert "Iterator[ttlaunch.app.run_handle.LogLine]" in found
    assert "tuple[ttlaunch.planning.launch_plan.RankRow, ...]" in found
    assert 'use.py:6: error: Unexpected keyword argument "gracee"' in found


# What is wrong with an order.


WRONG = [
    ({"set": {"training_config.stepz": 9}}, "--set training_config.stepz=9"),
    ({"set": {"training_config.steps": "many"}}, "--set training_config.steps=many"),
    ({"on": "nowhere"}, "--on nowhere"),
    ({"config": "."}, "-c ."),
    ({"config": "no.yaml"}, "-c no.yaml"),
    ({"resume": "latest"}, "--resume latest"),
    ({"hostfile": "no.txt"}, "--hostfile no.txt"),
    ({"profile_steps": "x"}, "--profile-steps x"),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("options", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_mistake_has_the_words_and_the_status_of_the_command_line(command_line, options, words):
    answer = command_line(f"run hierarchical_parallel {words}")
    with pytest.raises(ttlaunch.LaunchError) as caught:
        ttlaunch.start("hierarchical_parallel", **options)
    assert answer.stderr == f"{caught.value}\n\n"
    assert answer.status == caught.value.exit_status != 0
    assert not Path("runs").exists()


def test_an_unknown_recipe_is_refused_with_the_nearest_name(here):
    with pytest.raises(ttlaunch.LaunchError) as caught:
        ttlaunch.plan("hierarchical_paralel")
    (found,) = caught.value.diagnostics
    assert ("P001", ("did you mean `hierarchical_parallel`?",)) == (found.code, found.hints)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "`ranks=0`: a whole number of at least 1 was expected"),
        ({"ranks": "2"}, "`ranks='2'`: a whole number of at least 1 was expected"),
        ({"ranks": True}, "`ranks=True`: a whole number of at least 1 was expected"),
        ({"grace": -1}, "`grace=-1`: a number of at least 0 was expected"),
        ({"lease": 1}, "`lease=1`: a number of at least 2 was expected"),
        ({"hang_timeout": float("nan")}, "`hang_timeout=nan`: a number of at least 1 was expected"),
        ({"max_restarts": 1.5}, "`max_restarts=1.5`: a whole number of at least 0 was expected"),
    ],
)
def test_a_number_that_an_option_cannot_have_is_refused(here, options, message):
    with pytest.raises(ttlaunch.LaunchError) as caught:
        ttlaunch.start("hierarchical_parallel", **options)
    assert ([message], 2) == ([one.message for one in caught.value.diagnostics], caught.value.exit_status)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hostfile": 5}, "`hostfile=5`: a text or a path was expected"),
        ({"config": b"x"}, "`config=b'x'`: a text or a path was expected"),
        ({"on": "a\0b"}, "`on='a\\x00b'`: a text without NUL was expected"),
        ({"mpi_args": ["-x"]}, "`mpi_args=['-x']`: a text was expected"),
        ({"args": "-c x"}, "`args='-c x'`: a list of texts was expected"),
        ({"set": "training_config.steps=5"}, "`set='training_config.steps=5'`: a list of texts was expected"),
        ({"set": [b"k=v"]}, "`set=[b'k=v']`: `KEY=VALUE` was expected"),
        (
            {"set": {"a=b #": 1}},
            "`set={'a=b #': 1}`: 'a=b #' is no key; one such as 'training_config.steps' was expected",
        ),
        ({"set": {"a": {1, 2}}}, "`set={'a': {1, 2}}`: a set has no place in a training file"),
        ({"env": {"A_TOKEN=": "canary"}}, "`env=…`: a name without `=` was expected"),
        ({"env": {"A_TOKEN": 3}}, "`env=…`: a text as value was expected"),
        ({"env": "A=1"}, "`env=…`: a list of texts was expected"),
        ({"env": ["1A=canary"]}, "`--env 1A` does not name an environment variable"),
    ],
)
def test_what_an_option_cannot_be_is_refused(here, options, message):
    with pytest.raises(ttlaunch.LaunchError) as caught:
        ttlaunch.plan("hierarchical_parallel", **options)
    assert ([message], 2) == ([one.message for one in caught.value.diagnostics], caught.value.exit_status)
    assert [message] == [one.message for one in ttlaunch.validate("hierarchical_parallel", **options).diagnostics]


@pytest.mark.parametrize("env", [{"A": "1", "B_TOKEN": "canary"}, ["A=1", "B_TOKEN=canary"]])
def test_variables_for_ranks_are_planned_without_their_secrets(here, env):
    plan = ttlaunch.plan("data_parallel", env=env)
    assert ("1", "env:TTLAUNCH_SECRET_0") == (plan.environment["A"], plan.environment["B_TOKEN"])
    assert "canary" not in repr(plan)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "there is no target: a recipe, a script or a program's command line was expected"),
        ([], "the command line of the program is empty"),
        (5, "5 is no target: a list of texts was expected"),
        (b"sh", "b'sh' is no target: a list of texts was expected"),
        (["sh", 5], "['sh', 5] is no target: a list of texts was expected"),
        (["sh", "a\0b"], "['sh', 'a\\x00b'] is no target: a text without NUL was expected"),
        (["sh", "\ud800"], "['sh', '\\ud800'] is no target: a text that UTF-8 can write was expected"),
    ],
)
def test_a_target_that_is_none_is_refused(here, target, message):
    with pytest.raises(ttlaunch.LaunchError) as caught:
        ttlaunch.start(target)
    assert ([message], 2) == ([one.message for one in caught.value.diagnostics], caught.value.exit_status)


def test_a_misspelled_option_is_a_mistake_of_the_program(here):
    with pytest.raises(
        TypeError, match=r"start\(\) got an unexpected keyword argument 'max_restart'; did you mean 'max_restarts'"
    ):
        ttlaunch.start("hierarchical_parallel", max_restart=3)
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'resume'"):
        ttlaunch.plan("hierarchical_parallel", resume="latest")


def test_standard_input_belongs_to_the_caller(here):
    with pytest.raises(ttlaunch.LaunchError, match="standard input belongs to the program that calls"):
        ttlaunch.start("hierarchical_parallel", config="-")


@pytest.mark.parametrize("options", [{"on": "x" * 5000}, {"config": "x" * 5000}], ids=["on", "config"])
def test_what_the_system_refuses_to_read_is_a_diagnostic(here, options):
    with pytest.raises(ttlaunch.LaunchError, match="file name too long"):
        ttlaunch.plan("hierarchical_parallel", **options)


def test_a_current_folder_that_is_gone_is_said(here, tmp_path_factory, monkeypatch):
    gone = tmp_path_factory.mktemp("gone")
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ttlaunch.LaunchError, match="the current folder cannot be read: no such file or directory"):
        ttlaunch.plan("hierarchical_parallel")


def test_values_mean_what_they_are(here):
    numpy = pytest.importorskip("numpy")
    found = spec_of(
        "x",
        checked_options(
            {
                "ranks": numpy.int64(2),
                "set": {
                    "a": numpy.int64(5),
                    "b": "1e-3",
                    "c": "no",
                    "d": "plain/path.txt",
                    "e": None,
                    "f": True,
                    "g": "",
                    "h": Path("x y"),
                },
            }
        ),
    )
    assert (2, int) == (found.ranks, type(found.ranks))
    assert ("a=5", 'b="1e-3"', 'c="no"', "d=plain/path.txt", "e=null", "f=true", 'g=""', 'h="x y"') == found.overrides


def test_validate_returns_mistakes_and_raises_on_demand(here):
    assert ttlaunch.validate().ok
    found = ttlaunch.validate("hierarchical_parallel", set={"training_config.stepz": 9})
    assert ["C004"] == [one.code for one in found.diagnostics if one.severity == "error"]
    with pytest.raises(ttlaunch.LaunchError, match="unknown key `stepz`"):
        found.raise_for_errors()
    assert not ttlaunch.validate(ranks=0).ok


def test_a_rank_starts_no_runs(here, monkeypatch):
    monkeypatch.setenv(contract.ENV_RANK, "3")
    monkeypatch.setenv(contract.ENV_RUN_ID, "2026-01-01T00-00-00-abcd")
    with pytest.raises(ttlaunch.LaunchError, match="this process is rank 3 of the run 2026-01-01T00-00-00-abcd"):
        ttlaunch.run("hierarchical_parallel")


def test_a_recipe_that_was_edited_is_read_anew(here):
    shutil.copytree(RECIPES / "fabric_minimal", here / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    assert ttlaunch.validate("./mine").ok
    declaration = here / "mine/recipe.py"
    declaration.write_text(declaration.read_text() + "\nRECIPE = None  # by mistake\n")
    assert ["P006"] == [one.code for one in ttlaunch.validate("./mine").diagnostics]


@pytest.mark.mpi
def test_a_plan_is_a_table_in_a_notebook(here):
    html = ttlaunch.plan("hierarchical_parallel")._repr_html_()
    assert 5 == html.count("<tr>")
    assert "<tr><td>3</td><td>optimizer</td><td>localhost</td><td>3</td><td>–</td></tr>" in html


# Runs.


@pytest.mark.mpi
def test_a_run_gives_the_bits_of_the_command_line_and_says_nothing(here, capfd):
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    environment, folder = dict(os.environ), Path.cwd()
    report = ttlaunch.run("hierarchical_parallel", set=SMALL, ranks=1)
    assert ("", "") == capfd.readouterr()
    assert handlers == {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert (environment, folder) == (dict(os.environ), Path.cwd())
    assert ("done", 0, 12, ()) == (report.status, report.exit_status, report.steps, report.diagnostics)
    report.raise_for_failure()
    words = ["run", "hierarchical_parallel", "-n", "1", *(w for k, v in SMALL.items() for w in ("--set", f"{k}={v}"))]
    answer = subprocess.run(
        [sys.executable, "-m", "ttlaunch", *words, "--format", "json"], capture_output=True, text=True, check=True
    )
    assert report.parameters_sha256 in answer.stdout
    assert ttlaunch.simulate("hierarchical_parallel", set=SMALL, ranks=1).parameters_sha256 == report.parameters_sha256
    assert f"<td style='text-align:left'>{report.run_id}</td>" in report._repr_html_()


@pytest.mark.mpi
@pytest.mark.core
def test_a_run_that_failed_is_a_report_with_its_cause(here):
    report = ttlaunch.run(["sh", "-c", "echo so it goes >&2; exit 7"], ranks=2)
    assert ("failed", 1) == (report.status, report.exit_status)
    assert "exited with status 7" in report.failure.message
    with pytest.raises(ttlaunch.LaunchError) as caught:
        report.raise_for_failure()
    assert (report.diagnostics, 1) == (caught.value.diagnostics, caught.value.exit_status)
    assert report.details["exit_status"] == 1


@pytest.mark.mpi
def test_what_ranks_print_and_measure_can_be_read(here):
    with ttlaunch.start(["sh", "-c", "echo one; echo two >&2; sleep 1; echo three"], ranks=2) as run:
        lines = list(run.logs(follow=True, only=["rank=1"]))
        assert ["one", "three"] == [line.text for line in lines if line.stream == "stdout"]
        assert {(1, "rank", "localhost")} == {(line.rank, line.role, line.host) for line in lines}
        assert ["two"] == [line.text for line in run.logs(only=["rank=0"], stream="stderr")]
        with pytest.raises(ttlaunch.LaunchError, match="names no rank of this run"):
            run.logs(only=["rank=7"])
        with pytest.raises(ttlaunch.LaunchError, match="is neither `stdout` nor `stderr`"):
            run.logs(stream="stdin")
    assert "done" == run.wait().status
    events = run.metrics()
    assert ["run", "end"] == [events[0].kind, events[-1].kind]
    frame = events.to_pandas()
    assert (len(events), ["time", "kind", "rank", "step"]) == (len(frame), list(frame.columns[:4]))


@pytest.mark.mpi
def test_waiting_may_end_before_the_run_and_stopping_twice_is_harmless(here):
    run = ttlaunch.start(["sleep", "60"], ranks=2)
    with pytest.raises(TimeoutError):
        run.wait(timeout=0.1)
    assert (True, None) == (run.is_running, run.report)
    first = run.stop(now=True)
    assert ("interrupted", 130) == (first.status, first.exit_status)
    assert first is run.stop()
    assert first is run.report
    assert [] == processes_of(run.id)


@pytest.mark.mpi
def test_leaving_the_block_ends_the_run(here):
    """At once: an order that comes before the engine was started leaves a report too."""
    with pytest.raises(ZeroDivisionError), ttlaunch.start(["sleep", "60"], grace=0) as run:
        _ = 1 / 0
    assert "interrupted" == run.report.status
    assert [] == processes_of(run.id)


@pytest.mark.mpi
def test_a_folder_that_is_gone_is_said(here):
    run = ttlaunch.start(["true"])
    run.wait()
    again = ttlaunch.attach(run.id)
    shutil.rmtree(run.folder)
    for read in (again.wait, again.logs, again.metrics):
        with pytest.raises(ttlaunch.LaunchError, match=r"P031.*cannot be read: .*no such file"):
            read()
    with pytest.raises(ttlaunch.LaunchError, match="P030"):
        ttlaunch.attach(run.id)


@pytest.mark.mpi
def test_two_threads_start_runs_at_once_and_neither_has_to_live_on(here):
    """A death signal would come when the thread that started a run ends."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: ttlaunch.start(["sleep", "2"], ranks=2), range(2)))
    assert {"done"} == {run.wait().status for run in found}
    assert 2 == len({run.id for run in found})


@pytest.mark.mpi
def test_it_works_inside_a_running_event_loop(here):
    async def cell():
        return ttlaunch.run(["true"], ranks=2)

    assert "done" == asyncio.run(cell()).status


CALLER = """
import os, sys, ttlaunch
run = ttlaunch.start(["sleep", "120"], ranks=2, detach={detach})
if os.fork() == 0:
    import time
    time.sleep(100)  # keeps whatever it has inherited open
    os._exit(0)
print(run.id, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def caller(here):
    """`caller(detach=…)`: another program that has started a run and forked a child, and the run's id."""
    started = []

    def start(*, detach):
        code = CALLER.format(detach=detach)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.mpi
def test_a_run_ends_with_the_program_that_started_it_however_that_dies(caller):
    process, run_id = caller(detach=False)
    until(lambda: len(processes_of(run_id)) >= 2)
    process.kill()
    report = ttlaunch.attach(run_id).wait(timeout=DEADLINE_S)
    assert ("terminated", 143) == (report.status, report.exit_status)
    assert [] == processes_of(run_id)


@pytest.mark.mpi
def test_a_detached_run_outlives_the_program_that_started_it(caller):
    process, run_id = caller(detach=True)
    process.kill()
    process.wait()
    run = ttlaunch.attach(run_id)
    with pytest.raises(TimeoutError):
        run.wait(timeout=1.0)
    assert [run_id] == [one.folder.name for one in ttlaunch.runs(every=False) if one.folder == run.folder]
    assert "interrupted" == run.stop(now=True).status


@pytest.mark.mpi
def test_a_forked_child_sees_the_run_and_cannot_hurt_it(here):
    run = ttlaunch.start(["sleep", "3"], ranks=2)
    child = os.fork()
    if not child:
        try:
            run.wait(timeout=0.2)
        except TimeoutError:
            os._exit(0 if run.is_running and run.report is None else 1)
        finally:
            os._exit(2)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert "done" == run.wait().status


@pytest.mark.mpi
def test_a_signal_handler_may_stop_a_run_that_is_being_waited_for(here):
    code = """
import signal, ttlaunch
run = ttlaunch.start(["sleep", "60"])
signal.signal(signal.SIGALRM, lambda *_: run.stop(now=True))
signal.setitimer(signal.ITIMER_REAL, 1.0)
print(run.wait().status)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert "interrupted\n" == found.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("delay_s", [0.1, 0.4, 0.7, 1.2])
def test_ctrl_c_while_a_run_starts_leaves_none(here, delay_s):
    code = f"""
import os, signal, threading, ttlaunch
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests that run in the background ignore
threading.Timer({delay_s}, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    ttlaunch.run(["sleep", "60"], ranks=2, grace=0)
except KeyboardInterrupt:
    print(len(ttlaunch.runs(every=False)))
"""
    environment = {**os.environ, "XDG_STATE_HOME": str(here)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "0\n" == found.stdout


@pytest.mark.mpi
def test_a_daemon_without_standard_streams_starts_runs(here):
    code = """
import os, ttlaunch
for descriptor in (0, 1, 2):
    os.close(descriptor)
report = ttlaunch.run(["true"])
with open("said", "w") as file:
    file.write(report.status)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
    assert "done" == Path("said").read_text()


@pytest.mark.mpi
def test_runs_leave_neither_descriptors_nor_threads_nor_zombies(here):
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    own = set(children.read_text().split())  # of other tests, such as the process that simulations are forked from
    ttlaunch.run(["true"])
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for _ in range(5):
        ttlaunch.start(["true"])
    until(lambda: set(children.read_text().split()) <= own)
    until(lambda: before == (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))


@pytest.mark.mpi
def test_a_folder_for_runs_that_cannot_be_made_is_said_by_the_supervisor(here):
    with pytest.raises(ttlaunch.LaunchError, match=r"H008.*file name too long"):
        ttlaunch.start(["true"], runs_dir="x" * 300)


@pytest.mark.mpi
def test_a_killed_supervisor_is_named_and_leaves_nothing(here):
    run = ttlaunch.start(["sleep", "60"], ranks=2)
    until(lambda: len(processes_of(run.id)) >= 2)
    os.kill(run._started.pid, signal.SIGKILL)
    with pytest.raises(ttlaunch.LaunchError, match=f"R050.*the supervisor of {run.id} was killed by SIGKILL"):
        run.wait()
    assert [] == processes_of(run.id)


@pytest.mark.mpi
def test_a_plan_that_has_changed_meanwhile_is_not_started(here):
    spec = spec_of(["true"], {})
    supervisor = spawn_supervisor(
        spec, RunOptions(Path("runs")), plan_hash="0" * 64, max_restarts=0, sinks=(), detach=False
    )
    with pytest.raises(ttlaunch.LaunchError, match=r"P048.*has changed while it was being started"):
        supervisor.wait_for_run()
    assert not Path("runs").exists()


@pytest.mark.mpi
def test_a_restart_belongs_to_the_same_run(here):
    once = "if [ -e been ]; then echo again; else touch been; sleep 0.3; exit 3; fi"
    run = ttlaunch.start(["sh", "-c", once], max_restarts=2)
    first = run.id
    report = run.wait()
    assert ("done", [first]) == (report.status, [one.run_id for one in report.earlier])
    assert "failed" == report.earlier[0].status
    assert (report.run_id, report.folder) == (run.id, run.folder)
    assert run.id != first


def test_html_of_a_result_escapes_what_hosts_and_files_say(here):
    (here / "<b>.yaml").write_text("training_config: {stepz: <script>}\n")
    found = ttlaunch.validate("hierarchical_parallel", config="<b>.yaml")
    assert "<script>" not in found._repr_html_()
    assert "&lt;b&gt;.yaml" in found._repr_html_()


@pytest.mark.mpi
def test_a_run_may_be_waited_for_from_several_threads(here):
    run = ttlaunch.start(["sleep", "1"])
    found = []
    threads = [threading.Thread(target=lambda: found.append(run.wait().run_id)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.id] * 3 == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elastic": "1:2", "coordinator": "10.0.0.1"}, "`--coordinator 10.0.0.1`: it is not HOST:PORT"),
        (
            {"coordinator": "127.0.0.1:0"},
            "`--coordinator` takes workers of other machines, and the workers of this run",
        ),
        (
            {"elastic": "1:2", "coordinator": "0.0.0.0:0"},
            "`--coordinator 0.0.0.0:0` names every network of this machine",
        ),
    ],
)
def test_an_address_at_which_a_run_cannot_take_workers_is_refused_before_it_has_a_folder(here, options, message):
    with pytest.raises(ttlaunch.LaunchError, match="P082") as error:
        ttlaunch.start("data_parallel", ranks=2, **options)
    assert error.value.diagnostics[0].message.startswith(message)
    assert [] == list(here.iterdir())


def test_a_run_that_python_starts_takes_workers_of_other_machines(here):
    more = {"elastic": "1:2", "coordinator": "127.0.0.1:0", "set": SMALL | {"training_config.steps": 5000}}
    with ttlaunch.start("data_parallel", ranks=1, **more) as run:
        place = until(lambda: list(here.glob(f"runs/*/{contract.COORDINATOR_FILE}")))[0]
        assert "https://127.0.0.1:" in place.read_text()
        run.stop()
