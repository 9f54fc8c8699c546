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
from ttlaunch.app.carry_out import RunOptions
from ttlaunch.app.library import spec_of
from ttlaunch.app.spawn import spawn_supervisor

RECIPES = Path(__file__).parents[2] / "recipes"
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
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "use.py"]
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
        ({"lease": 1}, "`lease=1`: a number of at least 3 was expected"),
        ({"hang_timeout": float("nan")}, "`hang_timeout=nan`: a number of at least 1 was expected"),
        ({"max_restarts": 1.5}, "`max_restarts=1.5`: a whole number of at least 0 was expected"),
    ],
)
def test_a_number_that_an_option_cannot_have_is_refused(here, options, message):
    with pytest.raises(ttlaunch.LaunchError) as caught:
        ttlaunch.start("hierarchical_parallel", **options)
    assert ([message], 2) == ([one.message for one in caught.value.diagnostics], caught.value.exit_status)


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
        with pytest.raises(ttlaunch.LaunchError, match=r"P031.*cannot be read: no such file"):
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
def test_a_killed_supervisor_is_named_and_leaves_nothing(here):
    run = ttlaunch.start(["sleep", "60"], ranks=2)
    until(lambda: len(processes_of(run.id)) >= 2)
    os.kill(run._supervisor.pid, signal.SIGKILL)
    with pytest.raises(ttlaunch.LaunchError, match=f"R050.*the supervisor of {run.id} was killed by SIGKILL"):
        run.wait()
    assert [] == processes_of(run.id)


@pytest.mark.mpi
def test_a_plan_that_has_changed_meanwhile_is_not_started(here):
    spec = spec_of(["true"], {}, {})
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
