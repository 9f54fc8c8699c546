"""Runs the command line of the code under test on the launcher of a test cluster."""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Answer:
    """What a command said and how it ended."""

    status: int
    stdout: str
    stderr: str


class CommandLine:
    """`ttlaunch` on the launcher of one cluster, in one folder."""

    def __init__(self, cluster, *, cwd, python=sys.executable):
        self.cluster, self.cwd, self.python = cluster, cwd, python

    def __call__(self, line, *, stdin=None, timeout_s=60, environment=None):
        """Run to the end. A command that takes too long is killed with its whole process group, and fails the test."""
        process = self.start(line, environment=environment, stdin=subprocess.PIPE)
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            pytest.fail(f"`ttlaunch {line}` did not end within {timeout_s} s and said:\n{stdout}\n{stderr}")
        return Answer(process.returncode, stdout, stderr)

    def start(self, line, *, environment=None, **options):
        """Start it and return the process, which leads a process group and receives the signals sent to it."""
        words = shlex.split(line) if isinstance(line, str) else [str(word) for word in line]
        plain = {"COLUMNS": "160", "NO_COLOR": "1"}
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return self.cluster.popen(
            "launcher",
            [self.python, "-m", "ttlaunch", *words],
            cwd=self.cwd,
            env=self.cluster.environment("launcher") | plain | (environment or {}),
            start_new_session=True,
            **options,
        )
