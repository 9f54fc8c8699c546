"""Ranks under mpirun that find torch imported: mpirun starts a small program, which has one process that has it fork the rank.

As a program it is what mpirun starts: `python -I -S forked_ranks.py SOCKET`. It hands its variables and outputs to the process that
forks, and ends as the rank does; if mpirun ends it, the rank is killed. Ranks of `ttlaunch run` are started in the usual way.
"""

import array
import gc
import json
import os
import selectors
import signal
import socket
import sys

_LARGEST = 1 << 20


def stand_in(path):
    """Have a rank forked with our variables and outputs, and end as it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        # `Path` is not imported here: that would take longer than all the rest.
        request = json.dumps({"cwd": os.getcwd(), "env": dict(os.environ)}).encode()  # noqa: PTH109
        server.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (1, 2)))])
        answer = server.recv(_LARGEST)
    status = int(answer or b"1")  # nothing: the process that forks has gone
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path):
    """Fork ranks until standard input is closed; returns the request and outputs of a rank in its process, and None at the end."""
    from importlib import import_module  # noqa: PLC0415 - what stands in for a rank imports next to nothing

    for module in ("torch._dynamo", "torch.distributed.fsdp"):  # the first optimizer imports one, a recipe the other
        import_module(module)
    return _Forker(path).serve()


class _Forker:
    """The process that has torch, and the connections of those that stand in for its ranks."""

    def __init__(self, path):
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{path}.part")
        self._listener.listen()
        os.rename(f"{path}.part", path)  # noqa: PTH104 - as above
        self._ranks = {}

    def serve(self):
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    for pid in self._ranks.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj in self._selector.get_map() and (forked := key.data(key.fileobj)):
                    return forked

    def _accept(self, listener):
        client, _ = listener.accept()
        self._selector.register(client, selectors.EVENT_READ, self._fork)

    def _fork(self, client):
        from ttlaunch import contract  # noqa: PLC0415
        from ttlaunch.runtime.import_ahead import import_ahead  # noqa: PLC0415

        data, outputs, *_ = socket.recv_fds(client, _LARGEST, 2)
        self._selector.unregister(client)
        if not data:
            return client.close()
        request = json.loads(data)
        import_ahead(request["env"][contract.ENV_PLAN])
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            for one in (self._listener, client, *self._ranks):
                one.close()
            return request, outputs
        self._ranks[client] = pid
        for output in outputs:
            os.close(output)
        self._selector.register(client, selectors.EVENT_READ, self._kill)
        ended = os.pidfd_open(pid)
        self._selector.register(ended, selectors.EVENT_READ, lambda _: self._report(client, ended))
        return None

    def _kill(self, client):
        """Kill the rank of a program that has gone: nobody has waited for it, so its number is still its own."""
        self._selector.unregister(client)
        os.kill(self._ranks[client], signal.SIGKILL)

    def _report(self, client, ended):
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(self._ranks.pop(client), 0)
        if client in self._selector.get_map():
            self._selector.unregister(client)
            client.send(str(os.waitstatus_to_exitcode(status)).encode())
        client.close()


def _begin(request, outputs):
    import runpy  # noqa: PLC0415

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, output in enumerate([nothing, *outputs]):
        os.dup2(output, number)
        os.close(output)
    sys.argv = ["ttlaunch.runtime"]
    runpy.run_module("ttlaunch.runtime", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        stand_in(sys.argv[1])
    elif (found := serve(sys.argv[2])) is not None:
        _begin(*found)
