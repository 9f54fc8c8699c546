"""Simulations of commands that run in the process of a test, in processes that find torch imported: one has it and forks them.

A simulation plays all its ranks in one process, with or without values, for a few steps, which takes less than to import torch.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.runtime.elastic.forked_python import ask
from ttlaunch.engines.process import start_process

MODULES = {f"ttlaunch.runtime.{name}" for name in ("simulate", "virtual", "virtual_plans")}
"""What is forked. A prediction is not: what its process has in memory, all that the forker imported included, is part of it."""
_AT_START = ("PYTHON", "LD_", "MALLOC_", "OMP_", "MKL_", "TORCH")
"""How the variables begin that an interpreter or a library reads when it starts."""
_OF_SIMULATIONS = {"OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED"}
"""Those of them that a forked simulation has as well."""
_OF_MEMORY = {"MALLOC_MMAP_THRESHOLD_"}
"""Those that decide only when memory goes back to the kernel, on which no virtual clock depends."""
_LOOK_S = 0.01
_PIECE = 1 << 16


def _read_at_start(environment):
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_START) and name not in _OF_SIMULATIONS | _OF_MEMORY
    }


_OURS = _read_at_start(os.environ)


def start(argv, *, folder, environment):
    """Start a simulation in a forked process; any other program, or an environment of its own, as `start_process` does."""
    is_usual = _read_at_start(environment) == _OURS and environment.get("OMP_NUM_THREADS", "1") == "1"
    is_simulation = list(argv[:2]) == [sys.executable, "-m"] and argv[2] in MODULES
    if not is_simulation or not is_usual or not Path(folder).is_dir():
        return start_process(argv, folder=folder, environment=environment)
    return ForkedSimulation(argv[2], argv[3:], folder=folder, environment=environment)


class ForkedSimulation:
    """What `ttlaunch.lab` and `ttlaunch.app.predict.run_hollow` use of a `subprocess.Popen`.

    Attributes:
        pid: Its process, which stays a zombie until `poll` has its status.
        returncode: As that of a `Popen`.
    """

    def __init__(self, module, words, *, folder, environment):
        self._module = module
        self._output = {}
        pipes = os.pipe(), os.pipe()
        self.stdout, self.stderr = (os.fdopen(reading, "rb") for reading, _ in pipes)
        request = {"module": module, "words": list(words), "cwd": str(folder), "env": dict(environment)}
        self.pid = ask(request, [writing for _, writing in pipes])
        for _, writing in pipes:
            os.close(writing)
        self.returncode = None

    def poll(self):
        if self.returncode is None:
            self.returncode = ask({"status of": self.pid})
        return self.returncode

    def wait(self, timeout=None):
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(self._module, timeout)
            time.sleep(_LOOK_S)
        return self.returncode

    def communicate(self, timeout=None):
        """Read both outputs to their ends; after a timeout, another call goes on."""
        until = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for stream in (self.stdout, self.stderr):
                if not stream.closed:
                    selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(None if until is None else max(0.0, until - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(self._module, timeout)
                for key, _ in ready:
                    data = os.read(key.fd, _PIECE)
                    self._output.setdefault(key.fileobj, []).append(data)
                    if not data:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
        self.wait()
        return tuple(b"".join(self._output[stream]) for stream in (self.stdout, self.stderr))

    def terminate(self):
        self._send(signal.SIGTERM)

    def kill(self):
        self._send(signal.SIGKILL)

    def _send(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)
