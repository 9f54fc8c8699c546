"""A door and a head in processes of their own, as a serving run has them, for tests that speak HTTP to them."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

from ttlaunch.serving import wire

ROOT = Path(__file__).parents[2]


class Served:
    """The two processes, and how to reach them."""

    def __init__(self, folder, *, head=(), door=()):
        self.socket = folder / "serve.sock"
        self.head_arguments = head
        self.head = None
        self.errors = folder / "door.stderr"
        with self.errors.open("wb") as errors:
            self.start_door(door, errors)
        told = self.door.stdout.readline()
        if not told:  # it has refused its arguments, and ends
            self.end_door(status=2)
            raise AssertionError(self.errors.read_text())
        self.ports = json.loads(told)
        self.start_head()
        self.url = f"http://127.0.0.1:{self.ports['api_port']}"
        self.page = f"http://127.0.0.1:{self.ports['port']}"

    def start_door(self, more, errors):
        self.door = subprocess.Popen(
            [
                *(sys.executable, "-m", "ttlaunch.serving.door", "--socket", str(self.socket)),
                *("--api-port", "0", "--port", "0", *more),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
        )

    def start_head(self, *more):
        self.head = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.echo_head", str(self.socket), *self.head_arguments, *more],
            cwd=ROOT,
        )

    def kill_head(self):
        self.head.kill()
        self.head.wait()

    def tell(self, state, reason=None):
        self.door.stdin.write(wire.encode(wire.RunState(state=state, reason=reason)))
        self.door.stdin.flush()

    def end(self):
        self.kill_head()
        self.end_door(status=0)

    def end_door(self, *, status):
        self.door.stdin.close()
        self.door.stdout.close()
        assert self.door.wait(30) == status, self.errors.read_text()
        assert "Traceback" not in self.errors.read_text(), self.errors.read_text()


@contextmanager
def serving(folder, *, head=(), door=(), wait=True, **client):
    """Start both, wait until a token has passed the head, and end both; a client of the API comes with them."""
    served = Served(folder, head=head, door=door)
    try:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False, **client) as http:
            if wait:
                until(lambda: http.get("/health").status_code == 200)
            yield served, http
    finally:
        served.end()


def until(true, seconds=30):
    """Wait until something is true, and give up after a time that only a broken server needs."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


def events(response):
    """The JSON of the events of an answer, which are read as they come."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
