"""A second try for failed tests: what passes alone is printed and does not fail the run, unless there are many of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
OUTER = ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
"""Variables that configure the pytest around these tests: the `-m` of `.ci/run` would deselect the tests made here."""
FLAKY = """\
    assert "PYTHONPATH" not in os.environ
    print("said in try", len(list(HERE.glob("{name}.*"))))
    (HERE / f"{name}.{{len(list(HERE.glob('{name}.*')))}}").touch()
    assert len(list(HERE.glob("{name}.*"))) == 2
"""


def second_try(folder, *runs):
    """Run tests with these bodies, one pytest after the other as `.ci/run` does; what the second try says of them all."""
    kept = folder / "failed.json"
    own = {name: value for name, value in os.environ.items() if name not in OUTER}
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the plugin of hypothesis takes a second to import
    for number, bodies in enumerate(runs):
        tests = [f"def test_{name}():\n{body}" for name, body in bodies.items()]
        head = "import os\nfrom pathlib import Path\nHERE = Path(__file__).parent\n\n\n"
        file = folder / f"test_some{number or ''}.py"
        file.write_text(head + "\n\n".join(tests), encoding="utf-8")
        first = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "second_try",
                "-p",
                "xdist",
                "-n",
                "2",
                "-c",
                os.devnull,
                "--rootdir",
                folder,
                file,
            ],
            cwd=folder,
            env={**own, "PYTHONPATH": str(CI), "SECOND_TRY_FILE": str(kept)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert first.returncode == 1, first.stdout + first.stderr
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
    again = subprocess.run(
        [sys.executable, CI / "second_try.py", kept, "--", *words],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    return again.returncode, again.stdout


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
    status, printed = second_try(tmp_path, {"shy": FLAKY.format(name="shy"), "wrong": "    assert 1 == 2\n"})
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
