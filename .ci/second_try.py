"""Give a failed test one more try by itself, so that a false alarm stops nobody and never hides.

As a pytest plugin (`-p second_try`, this folder on PYTHONPATH, `SECOND_TRY_FILE` set) it keeps what every failed test
printed. As a program it then runs each of them again, alone, and prints both outputs of those that pass now:

    python .ci/second_try.py FAILURES.json -- pytest [OPTION …]

Exit status 0 if every failed test passed alone and there are at most `MOST_FLAKY` of them, else 1.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_FLAKY = 3
MOST_TRIES = 8
"""With more failures than this something is broken, and trying each again would only take time."""

_FAILURES: dict[str, list[str]] = {}


def pytest_configure() -> None:
    """Keep this folder out of what tests start: the workers of xdist are given our module path by other means."""
    os.environ.pop("PYTHONPATH", None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a failed test, or its set-up, printed; with xdist this runs in the process that collects reports."""
    if report.failed:
        text = "\n".join([report.longreprtext, *(f"--- {name}\n{content}" for name, content in report.sections)])
        _FAILURES.setdefault(report.nodeid, []).append(text)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add to the file once, in the process that has all reports; an earlier run of pytest may have begun it."""
    if hasattr(session.config, "workerinput"):
        return
    path = Path(os.environ["SECOND_TRY_FILE"])
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(earlier | _FAILURES), encoding="utf-8")


def main(words: list[str]) -> int:
    """Try the failed tests again and return the exit status."""
    path, _, *pytest_words = words
    failures = json.loads(Path(path).read_text(encoding="utf-8"))
    if not failures:
        print("second try: pytest failed without a failed test")
        return 1
    if len(failures) > MOST_TRIES:
        print(f"second try: {len(failures)} tests failed, more than {MOST_TRIES}: none is tried again")
        return 1
    flaky, broken = {}, []
    for test in failures:
        again = subprocess.run([*pytest_words, test], capture_output=True, text=True, check=False)
        if again.returncode == 0:
            flaky[test] = again.stdout + again.stderr
        else:
            broken.append(test)
            print(f"\n=== failed twice: {test}\n{again.stdout}{again.stderr}")
    for test, output in flaky.items():
        print(f"\n=== FLAKY: {test}\n--- the first time")
        print("\n".join(failures[test]))
        print(f"--- alone\n{output}")
    for test in broken:
        print(f"failed twice: {test}")
    for test in flaky:
        print(f"FLAKY: {test}")
    if len(flaky) > MOST_FLAKY:
        print(f"second try: {len(flaky)} flaky tests; more than {MOST_FLAKY} fail the run")
    return int(bool(broken) or len(flaky) > MOST_FLAKY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
