"""A second try for failed tests: what passes alone is printed and does not fail the run, unless there are many of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
OUTER = ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
"""Variables that configure the pytest around these tests: the `-m` of `.ci/run` would deselect the tests made here."""
MOST_S = 100
"""Far longer than the five pytests of a second try take where several tests share two cores."""
FLAKY = """\
    assert "PYTHONPATH" not in os.environ
    print("said in try", len(list(HERE.glob("{name}.*"))))
    (HERE / f"{name}.{{len(list(HERE.glob('{name}.*')))}}").touch()
    assert len(list(HERE.glob("{name}.*"))) == 2
"""


def run_pytest(folder, words, variables):
    """Run an inner pytest. If it does not end, its threads' stacks are in what it printed, and the test fails with them.

    It has temporary folders of its own: in the usual place it would remove those of earlier sessions, which may take minutes.
    """
    command = [sys.executable, "-X", "faulthandler", *words]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**variables, "PYTEST_DEBUG_TEMPROOT": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=MOST_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            time.sleep(1)
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{command} had not ended after {MOST_S} s:\n{process.communicate()[0]}")
    return process.returncode, printed


def second_try(folder, *runs, workers=0):
    """Run tests with these bodies, one pytest after the other as `.ci/run` does; what the second try says of them all."""
    kept = folder / "failed.json"
    own = {name: value for name, value in os.environ.items() if name not in OUTER and "XDIST" not in name}
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the plugin of hypothesis takes a second to import
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
    for number, bodies in enumerate(runs):
        tests = [f"def test_{name}():\n{body}" for name, body in bodies.items()]
        head = "import os\nfrom pathlib import Path\nHERE = Path(__file__).parent\n\n\n"
        file = folder / f"test_some{number or ''}.py"
        file.write_text(head + "\n\n".join(tests), encoding="utf-8")
        distributed = ["-p", "xdist", "-n", str(workers)] if workers else []
        status, printed = run_pytest(
            folder,
            ["-m", "pytest", "-p", "second_try", *distributed, *options, file],
            {**own, "PYTHONPATH": str(CI), "SECOND_TRY_FILE": str(kept)},
        )
        assert status == 1, printed
    return run_pytest(folder, [CI / "second_try.py", kept, "--", sys.executable, "-m", "pytest", *options], own)


@pytest.mark.slow
def test_three_tests_that_pass_alone_are_printed_with_both_outputs_and_do_not_fail_the_run(tmp_path):
    shy = {f"shy{n}": FLAKY.format(name=f"shy{n}") for n in range(3)}
    status, printed = second_try(tmp_path, {"calm": "    pass\n", **shy})
    assert status == 0
    assert "=== FLAKY: test_some.py::test_shy0\n--- the first time" in printed
    assert "said in try 0" in printed
    assert "--- alone" in printed
    assert [2, 2, 2] == [printed.count(f"FLAKY: test_some.py::test_{name}\n") for name in shy]
    assert "test_calm" not in printed


@pytest.mark.slow
def test_a_test_that_fails_again_fails_the_run_beside_a_flaky_one(tmp_path):
    """With two processes of xdist, as in `.ci/run`; the others need none."""
    bodies = {"shy": FLAKY.format(name="shy"), "wrong": "    assert 1 == 2\n"}
    status, printed = second_try(tmp_path, bodies, workers=2)
    assert status == 1
    assert "failed twice: test_some.py::test_wrong" in printed
    assert "FLAKY: test_some.py::test_shy" in printed


@pytest.mark.slow
def test_with_many_failures_none_is_tried_again(tmp_path):
    status, printed = second_try(tmp_path, {f"shy{n}": FLAKY.format(name=f"shy{n}") for n in range(9)})
    assert status == 1
    assert "9 tests failed, more than 8: none is tried again" in printed


@pytest.mark.slow
def test_flaky_tests_of_two_runs_are_counted_together_and_four_fail_the_run(tmp_path):
    one, other = ({f"{name}{n}": FLAKY.format(name=f"{name}{n}") for n in range(2)} for name in ("shy", "timid"))
    status, printed = second_try(tmp_path, one, other)
    assert status == 1
    assert printed.count("=== FLAKY: ") == 4
