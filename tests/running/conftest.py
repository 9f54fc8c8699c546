"""How tests start a real run, break it, and look at what is left of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.agent.run_processes import run_processes
from ttlaunch.running.runs.run_folder import read_events


def wait_until(condition, *, within_s, what):
    """Wait for something to become true, and return it."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {within_s} s")
        time.sleep(0.01)
    return value


class StartedRun:
    """A `ttlaunch run` in a process and session of its own; in another interpreter and environment where they are given."""

    def __init__(self, folder, arguments, *, python=sys.executable, environment=None):
        self.folder = folder
        self._out, self._err = (folder / "out").open("wb"), (folder / "err").open("wb")
        self.process = subprocess.Popen(
            [python, "-m", "ttlaunch", "run", *arguments],
            cwd=folder,
            stdout=self._out,
            stderr=self._err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**(os.environ if environment is None else environment), "NO_COLOR": "1"},
        )

    @property
    def run_folder(self):
        folders = [path for path in self.folder.glob("runs/[!.]*") if path.is_dir()]
        return folders[0] if folders else None

    @property
    def stdout(self):
        return (self.folder / "out").read_text(errors="replace")

    @property
    def stderr(self):
        return (self.folder / "err").read_text(errors="replace")

    @property
    def report(self):
        return json.loads((self.run_folder / contract.REPORT_FILE).read_text())

    def records(self, rank):
        lines = (self.run_folder / contract.progress_file(rank)).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def wait_for_file(self, name, *, within_s=60):
        """Wait until a rank has written a file into the working folder."""
        path = self.folder / name

        def written():
            if self.process.poll() is not None:
                pytest.fail(f"the run ended before {name} was written:\n{self.stdout}{self.stderr}")
            return path.is_file() and path.read_text()

        return wait_until(written, within_s=within_s, what=f"{name} is written")

    def ends(self, *, within_s):
        """The exit status, in time."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run had not ended after {within_s:.1f} s:\n{self.stdout}{self.stderr}")

    def supervisor(self):
        """Process id of the supervisor; what was started here only shows the run."""
        return json.loads((self.run_folder / contract.LAUNCHER_FILE).read_text())["pid"]

    def mpirun(self):
        """Process id of mpirun, as the history has it."""
        [start] = [event for event in read_events(self.run_folder) if event["event"] == "start"]
        return start["mpirun"]

    def processes(self):
        """What still carries this run's id."""
        return run_processes(self.run_folder.name)

    def scratch_folders(self):
        return list(Path("/dev/shm").glob(f"ttl-{self.supervisor()}-*"))  # noqa: S108 - looked at, not used

    def close(self):
        """Leave nothing, whatever the test found."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.processes() if self.run_folder else []:
            os.kill(pid, signal.SIGKILL)
        self._out.close()
        self._err.close()


@pytest.fixture
def start_run(here):
    """`start_run(*arguments, python=…)` starts `ttlaunch run` in the empty folder; it is ended with the test."""
    runs = []

    def start(*arguments, python=sys.executable):
        runs.append(StartedRun(here, arguments, python=python))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture
def until():
    """`until(condition, within_s=…, what=…)` waits for an event with a deadline."""
    return wait_until
