"""Scripts that travel to a host through standard input, and the frames that they answer with."""

import shlex
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent

import pytest

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport import pushed
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import Interpreter, explain_end, start_script

ECHO = """
    import os, sys
    from ttlaunch import contract

    def main(arguments):
        os.write(1, contract.pack_frame({"arguments": arguments, "path": sys.path, "argv": sys.argv}))
        while True:
            frame = contract.read_frame(lambda size: os.read(0, size))
            if frame is None:
                return 5
            os.write(1, contract.pack_frame({"got": frame[0]}, frame[1][::-1]))
"""


@pytest.fixture
def script(shell_host, monkeypatch):
    """`script(text, …)`: start that text on a host as if it were one of our scripts."""

    def start(text=ECHO, **options):
        monkeypatch.setattr(pushed, "_source", lambda _: dedent(text))
        pushed._packed_modules.cache_clear()
        return start_script(shell_host.transport, "echo", timeout_s=10, **options)

    return start


@pytest.fixture
def interpreter(shell_host, monkeypatch):
    """`interpreter(texts)`: a Python on a host for scripts with these texts, by name."""
    made = []

    def make(texts, **options):
        monkeypatch.setattr(pushed, "_source", lambda name: dedent(texts[name]))
        pushed._packed_modules.cache_clear()
        made.append(Interpreter(shell_host.transport, **options))
        return made[-1]

    yield make
    for one in made:
        one.drop()


def error_of(call):
    with pytest.raises(HostError) as caught:
        call()
    return caught.value


def test_a_script_runs_and_speaks_in_frames(script):
    stream = script(arguments={"name": "it's", "n": [1, None]})
    header, body = stream.expect(timeout_s=10)
    assert (header["arguments"], body) == ({"name": "it's", "n": [1, None]}, b"")
    stream.send({"step": 1}, b"abc", timeout_s=10)
    assert stream.expect(timeout_s=10) == ({"got": {"step": 1}}, b"cba")
    stream.process.close_stdin()
    assert stream.receive(timeout_s=10) is None
    assert stream.process.wait(timeout_s=10) == 5


def test_arguments_show_on_no_command_line_and_the_current_folder_is_no_place_to_import_from(script):
    header, _ = script(arguments={"secret": "canary"}).expect(timeout_s=10)
    assert "canary" not in str(header["argv"])
    assert "" not in header["path"]


def test_a_large_frame_arrives_whole(script):
    stream = script()
    stream.expect(timeout_s=10)
    body = bytes(range(256)) * 20_000
    stream.send({}, body, timeout_s=30)
    assert stream.expect(timeout_s=30) == ({"got": {}}, body[::-1])


def test_a_script_that_breaks_is_quoted(script):
    stream = script("def main(arguments):\n    raise ValueError('no such disk')\n")
    error = error_of(lambda: stream.expect(timeout_s=10))
    assert (error.trouble, error.evidence) == (Trouble.SCRIPT, "our script on it broke: ValueError: no such disk")


def test_a_script_that_closes_its_output_before_it_breaks_is_quoted(script):
    stream = script(
        "import os, time\ndef main(arguments):\n    os.close(1)\n    time.sleep(0.2)\n    os.write(2, b'late')\n"
    )
    error = error_of(lambda: stream.expect(timeout_s=10))
    assert (error.trouble, error.evidence) == (Trouble.SCRIPT, "our script on it broke: late")


def test_a_script_that_prints_is_told_apart(script):
    stream = script("def main(arguments):\n    print('hello, I am here')\n    return 0\n")
    error = error_of(lambda: stream.expect(timeout_s=10))
    assert (error.trouble, error.evidence) == (
        Trouble.SCRIPT,
        "something prints into our connection: not a frame: b'hello, I'",
    )


def test_a_script_that_ends_in_the_middle_of_a_frame_is_lost(script):
    stream = script(
        "import os\ndef main(arguments):\n    os.write(1, bytes([0, 0, 0, 9, 0, 0, 0, 0, 65]))\n    return 0\n"
    )
    error = error_of(lambda: stream.expect(timeout_s=10))
    assert (error.trouble, error.evidence) == (Trouble.LOST, "the connection ended in the middle of a message")


def test_a_script_that_says_nothing_is_given_up_at_the_deadline(script):
    stream = script()
    stream.expect(timeout_s=10)
    error = error_of(lambda: stream.expect(timeout_s=0.3))
    assert (error.trouble, error.evidence) == (Trouble.TIMED_OUT, "no answer from our script on it within 0.3 s")


def test_an_interpreter_that_the_caller_names_is_tried_first(script, fake_python):
    old = fake_python("2.7.18")
    stream = script(pythons=[f"{old}/python3", "no-such-python", "~/no/python"])
    assert stream.expect(timeout_s=10)[0]["arguments"] == {}
    assert b"is 2.7" in stream.process.stderr()


def test_interpreters_that_are_all_too_old_are_named(script, fake_python, monkeypatch):
    old, older = fake_python("3.8.10"), fake_python("2.7.18")
    monkeypatch.setattr(pushed, "PYTHONS", (f"{old}/python3", f"{older}/python3"))
    error = error_of(lambda: _start_and_explain(script))
    assert error.trouble is Trouble.NO_PYTHON
    assert error.evidence.startswith("its Python is too old: ")
    assert error.evidence.endswith(" is 2.7; 3.9 or newer is needed")
    assert " is 3.8, " in error.evidence


def test_a_host_without_python_is_told_apart(script, monkeypatch):
    monkeypatch.setattr(pushed, "PYTHONS", ("no-python", "/no/python3", "~/no/python3"))
    error = error_of(lambda: _start_and_explain(script))
    assert (error.trouble, error.evidence) == (
        Trouble.NO_PYTHON,
        "no Python 3.9 or newer: looked for no-python, /no/python3, ~/no/python3 and others",
    )


def _start_and_explain(script):
    stream = script()
    assert stream.receive(timeout_s=10) is None
    raise explain_end(stream, timeout_s=10)


def test_any_other_end_is_left_to_the_caller(script):
    stream = script("def main(arguments):\n    return 3\n")
    assert stream.receive(timeout_s=10) is None
    assert explain_end(stream, timeout_s=10) is None


def test_frames_can_be_spoken_with_any_program(host):
    stream = FrameStream("box", host.start("cat"))
    stream.send({"a": "ü"}, b"\0\1", timeout_s=10)
    assert stream.expect(timeout_s=10) == ({"a": "ü"}, b"\0\1")
    stream.process.close_stdin()
    assert stream.receive(timeout_s=10) is None


def test_the_loader_is_understood_by_pythons_that_are_too_old():
    """No f-string, no annotation, no walrus before the version has been looked at: it would be a syntax error there."""
    head = pushed._LOADER.partition("sys.exit")[0]
    assert 'f"' not in head
    assert "print" not in head
    assert shlex.split(pushed._command(["~/a b/python"]))


# One Python for several scripts

SAY = """
    import os
    from ttlaunch import contract
    {first}
    def main(arguments):
        {then}
        contract.send_frame({{"parent": os.getppid(), "own": os.getpid(), "umask": os.umask(0)}})
        return arguments.get("status", 0)
"""
PLAIN = SAY.format(first="", then="")


def test_scripts_that_follow_each_other_run_in_one_python_and_leave_nothing_to_the_next(interpreter):
    python = interpreter({"one": PLAIN, "two": PLAIN})
    first = python.start("one", timeout_s=10).expect(timeout_s=10)[0]
    second = python.start("two", timeout_s=10).expect(timeout_s=10)[0]
    last = python.start("two", is_last=True, timeout_s=10).expect(timeout_s=10)[0]

    assert first["parent"] == second["parent"] == last["own"]
    assert first["umask"] == second["umask"] == last["umask"] != 0


def test_a_script_ahead_is_compiled_while_the_first_one_runs(interpreter, tmp_path):
    sign = str(tmp_path / "loaded")
    waits = SAY.format(first="import time", then=f"while not os.path.exists({sign!r}): time.sleep(0.01)")
    says = SAY.format(first=f"open({sign!r}, 'x').close()", then="")  # another load of it would raise FileExistsError
    python = interpreter({"waits": waits, "says": says}, ahead=["says"])

    first = python.start("waits", timeout_s=10)
    python.send_ahead(timeout_s=10)
    assert first.expect(timeout_s=10)
    assert python.start("says", timeout_s=10).expect(timeout_s=10)
    assert python.start("says", is_last=True, timeout_s=10).expect(timeout_s=10)


def test_a_script_that_is_not_the_first_reads_only_what_is_sent_to_it(interpreter):
    python = interpreter({"one": PLAIN, "echo": ECHO}, ahead=["echo"])
    python.start("one", timeout_s=10).expect(timeout_s=10)
    stream = python.start("echo", timeout_s=10)
    stream.expect(timeout_s=10)
    for number in range(50):
        stream.send({"n": number}, timeout_s=10)
        assert stream.expect(timeout_s=10) == ({"got": {"n": number}}, b"")


def test_a_script_that_fails_is_quoted_at_once_although_others_were_to_follow(interpreter):
    python = interpreter({"breaks": "def main(arguments):\n    raise ValueError('no such disk')\n"})
    stream = python.start("breaks", timeout_s=10)

    error = error_of(lambda: stream.expect(timeout_s=60))
    assert (error.trouble, error.evidence) == (Trouble.SCRIPT, "our script on it broke: ValueError: no such disk")


def test_a_script_after_one_that_was_dropped_gets_a_python_of_its_own(interpreter):
    python = interpreter({"one": PLAIN})
    first = python.start("one", timeout_s=10).expect(timeout_s=10)[0]
    python.drop()
    second = python.start("one", timeout_s=10).expect(timeout_s=10)[0]

    assert first["parent"] != second["parent"]


SAYS_HOW_IT_CAME = """
    from ttlaunch import contract

    def main(arguments):
        try:
            raise ValueError("asked for")
        except ValueError as error:
            contract.send_frame({"line": error.__traceback__.tb_lineno, "file": main.__code__.co_filename})
        return 0
"""


def test_every_script_comes_as_bytecode_to_the_same_python(interpreter):
    python = interpreter({"one": SAYS_HOW_IT_CAME, "two": SAYS_HOW_IT_CAME})
    texts = [python.start("one", timeout_s=10).expect(timeout_s=10)[0]]
    texts.append(python.start("two", is_last=True, timeout_s=10).expect(timeout_s=10)[0])

    assert [(None, "agent.one"), (None, "agent.two")] == [(one["line"], one["file"]) for one in texts]


def test_a_script_for_a_python_with_other_bytecode_comes_as_text(interpreter, monkeypatch):
    monkeypatch.setattr(pushed, "MAGIC_NUMBER", b"\0\0\r\n")
    python = interpreter({"one": SAYS_HOW_IT_CAME, "two": SAYS_HOW_IT_CAME})
    for name in ("one", "two"):
        assert python.start(name, is_last=name == "two", timeout_s=10).expect(timeout_s=10)[0]["line"] == 6


def test_a_python_that_was_started_ahead_gets_bytecode_at_once(shell_host, monkeypatch):
    monkeypatch.setattr(pushed, "_source", lambda _: dedent(SAYS_HOW_IT_CAME))
    pushed._packed_modules.cache_clear()
    waiting = pushed.start_interpreter(shell_host.transport, timeout_s=10)
    stream = start_script(shell_host.transport, "echo", interpreter=waiting, timeout_s=10)
    assert stream.expect(timeout_s=10)[0]["line"] is None


def test_only_the_first_frame_may_say_which_bytecode_a_host_understands(script):
    """A host that sends it again and again is no script of ours, and would be waited for until the deadline."""
    stream = script("""
        from ttlaunch import contract
        def main(arguments):
            while True:
                contract.send_frame({"kind": "python", "bytecode": "00"})
    """)
    assert stream.expect(timeout_s=10)[0]["kind"] == "python"
    stream.process.kill()


def test_bytecode_is_that_of_the_module_and_comes_from_its_file():
    code = pushed._code("agent.claims")
    assert code.co_filename.endswith("ttlaunch/agent/claims.py")
    assert "claim_existing" in code.co_names


def test_modules_are_packed_once_for_hosts_that_are_reached_at_the_same_time(monkeypatch):
    read, together = [], threading.Barrier(8)

    def source(name):
        read.append(name)
        time.sleep(0.05)  # long enough for the others to come too
        return ""

    def ask():
        together.wait()
        return pushed._modules(("one", "two"))

    monkeypatch.setattr(pushed, "_source", source)
    pushed._packed_modules.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        packed = {future.result() for future in [pool.submit(ask) for _ in range(8)]}
    pushed._packed_modules.cache_clear()

    assert (read, len(packed)) == (["one", "two"], 1)
