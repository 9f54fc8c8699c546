"""`ttlaunch dashboard` as a process: it ends when it is told to, also while pages are open."""

import re
import signal
import subprocess
import sys

import httpx
import pytest

from tests.dashboard.made_run import MadeRun


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_ends_at_once_and_without_a_traceback_while_a_page_follows_a_run(tmp_path, number, status):
    run = MadeRun(tmp_path / "runs/2026-01-01T00-00-00-aaaa")
    run.steps(1, 2)
    command = [sys.executable, "-m", "ttlaunch", "dashboard", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed = "".join(process.stdout.readline() for _ in range(3))
            url, key = re.search(r"open (\S+)#key=(\S+)", printed).groups()
            allowed = {"authorization": f"Bearer {key}"}
            address = f"{url}api/runs/{run.path.name}/events"
            with httpx.stream("GET", address, headers=allowed, trust_env=False) as events:
                next(events.iter_lines())
                process.send_signal(number)
                stderr = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert status == process.returncode
    assert stderr.strip() in {"", "interrupted"}
