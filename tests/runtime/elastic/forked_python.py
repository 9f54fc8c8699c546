"""Processes that run a module of `ttlaunch.runtime` and find torch imported, because one process that has it forks them all.

Importing torch takes each worker longer than the few steps that a test trains it for.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from importlib import import_module

from ttlaunch import contract
from ttlaunch.runtime.import_ahead import import_ahead

_LOOK_S = 0.01
_LARGEST = 1 << 20


class ForkedProcess:
    """What a test uses of `subprocess.Popen`.

    Attributes:
        pid: Its process, which stays a zombie until `poll` has its status.
    """

    def __init__(self, module, *, cwd, env, output):
        request = {"module": module, "cwd": str(cwd), "env": dict(env), "output": str(output)}
        self.pid = _ask(request)
        self._status = None

    def poll(self):
        """Return the exit status, negative for a signal, or None while it runs."""
        if self._status is None:
            self._status = _ask({"status of": self.pid})
        return self._status

    def wait(self):
        while self.poll() is None:
            time.sleep(_LOOK_S)
        return self._status

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _ask(request):
    ours = _start_forker()
    ours.sendall(json.dumps(request).encode())
    return json.loads(ours.recv(_LARGEST))


@cache
def _start_forker():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = os.environ | {"OMP_NUM_THREADS": "1"}  # read when torch is imported
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        forker = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables)

    @atexit.register
    def end():
        ours.close()
        forker.wait()

    return ours


def _fork_on_demand(theirs):
    """Answer requests until the tests have ended; return only in a forked process, with the module that it is to run."""
    children = set()
    while data := theirs.recv(_LARGEST):
        request = json.loads(data)
        if "module" in request:
            import_ahead(request["env"][contract.ENV_PLAN])
            gc.freeze()
            child = os.fork()
            if child == 0:
                return _begin(request)
            children.add(child)
            answer = child
        else:
            ended, status = os.waitpid(request["status of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
            children.discard(ended)
        theirs.sendall(json.dumps(answer).encode())
    for child in children:
        os.kill(child, signal.SIGKILL)
    return None


def _begin(request):
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    return request["module"]


if __name__ == "__main__":
    import_module("torch._dynamo")  # the first optimizer imports it
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        module = _fork_on_demand(requests)
    if module:
        sys.argv = [module]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
