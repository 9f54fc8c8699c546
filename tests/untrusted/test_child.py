"""What a limited child cannot do: compute for long, use much memory, say much, open anything, or outlive its parent (E22)."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttlaunch.untrusted import child
from ttlaunch.untrusted.child import Child, UntrustedError, read_limited

TASK = """
import os, socket
def answers(requests, file):
    for request in requests:
        yield str(eval(request["code"])).encode()
"""


@pytest.fixture
def tasks(monkeypatch):
    """A task that does whatever it is asked."""
    start = f"exec({TASK!r}); import ttlaunch.untrusted.__main__ as child; child.find_task = lambda _: answers; child.main()"
    monkeypatch.setattr(
        child, "_CODE", child._CODE.replace("from ttlaunch.untrusted.__main__ import main; main()", start)
    )


def ask(code, **limits):
    return read_limited("any", {"code": code}, **limits)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("[0 for _ in iter(int, 1)]", "takes more than"),
        ("sum(1 for _ in iter(int, 1))", "more than 1 s of processor time"),
        ("len(bytearray(2**30))", "more than 512 MiB of memory"),
        ("'a' * 2**21", "more than 1 MiB"),
        ("open('/etc/passwd')", "Too many open files"),
        ("socket.socket()", "Too many open files"),
        ("os.abort()", "more than 512 MiB of memory"),
        ("os._exit(9)", "ended with status 9"),
        ("(lambda f: f(f))(lambda f: f(f))", "more than 512 MiB of memory"),
    ],
)
def test_a_limit_that_is_reached_ends_in_one_clause(tasks, code, said):
    with pytest.raises(UntrustedError, match=said):
        ask(code, cpu_s=1)


def test_a_child_has_no_environment_and_answers_what_fits(tasks, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    assert b"None" == ask("os.environ.get('SECRET')")
    assert b"/" == ask("os.getcwd()")
    assert 2**20 == len(ask("'a' * 2**20"))


def test_a_child_that_says_nothing_is_stuck(tasks):
    with Child("any", wall_s=0.5) as one:
        one.send({"code": "__import__('time').sleep(60)"}, is_last=True)
        with pytest.raises(UntrustedError, match="stuck for 0 s"):
            one.answer()


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def test_a_child_dies_with_its_parent():
    code = "import time; from ttlaunch.untrusted.child import Child; c = Child('gguf-header'); print(c._process.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while state_of(pid) not in {"gone", "Z"}:  # until init reaps it, it is a zombie
        assert time.monotonic() < deadline
        time.sleep(0.01)
