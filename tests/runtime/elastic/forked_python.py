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
        self.pid = ask(request)
        self._status = None

    def poll(self):
        """Return the exit status, negative for a signal, or None while it runs."""
        if self._status is None:
            self._status = ask({"status of": self.pid})
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


def ask(request, descriptors=()):
    """Let the forker begin a module or say what became of one; `descriptors` are the outputs of one that has no file for them."""
    ours = _start_forker()
    socket.send_fds(ours, [json.dumps(request).encode()], descriptors)
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
    while (received := socket.recv_fds(theirs, _LARGEST, 2))[0]:
        data, outputs, *_ = received
        request = json.loads(data)
        if "module" in request:
            import_ahead(request["env"][contract.ENV_PLAN])
            gc.freeze()
            child = os.fork()
            if child == 0:
                return _begin(request, outputs)
            children.add(child)
            for output in outputs:
                os.close(output)
            answer = child
        else:
            ended, status = os.waitpid(request["status of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
            children.discard(ended)
        theirs.sendall(json.dumps(answer).encode())
    for child in children:
        os.kill(child, signal.SIGKILL)
    return None


def _begin(request, outputs):
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if outputs:
        sys.path[:1] = [request["cwd"], *filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    else:
        outputs = [os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)] * 2
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    for output in set(outputs):
        os.close(output)
    return [request["module"], *request.get("words", ())]


if __name__ == "__main__":
    import_module("torch._dynamo")  # the first optimizer imports it
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        words = _fork_on_demand(requests)
    if words:
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
