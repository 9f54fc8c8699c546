"""What a record says of an exception: message, notes, place, causes, and connections whose other end is gone."""

import io
import multiprocessing
import pickle
import socket

import pytest

from ttlaunch.rank_exceptions.describe import broken_connections, describe
from ttlaunch.rank_exceptions.outline import CONNECTION, TORCH, place_of, raised_elsewhere


def raised(function):
    with pytest.raises((ValueError, OSError, EOFError, KeyError)) as caught:
        function()
    return describe(caught.value)


def test_a_record_has_the_whole_message_and_the_notes():
    error = ValueError("first\nsecond")
    error.add_note("look at file 7")
    found = describe(error)
    assert (found["message"], found["notes"]) == ("first\nsecond", ["look at file 7"])


def test_the_exceptions_in_a_group_are_notes_and_the_only_one_gives_the_place(here):
    (here / "mine.py").write_text("def load(n):\n    raise ValueError(f'shard {n}')\n")
    scope = {}
    exec(compile((here / "mine.py").read_text(), str(here / "mine.py"), "exec"), scope)  # noqa: S102

    def part(number):
        with pytest.raises(ValueError, match="shard") as caught:
            scope["load"](number)
        return caught.value

    found = describe(ExceptionGroup("in a TaskGroup", [ExceptionGroup("inner", [part(1)])]))
    assert (found["file"], found["line"]) == (str(here / "mine.py"), 2)
    assert found["notes"] == ["ValueError: shard 1, at mine.py:2"]
    found = describe(ExceptionGroup("in a TaskGroup", [part(number) for number in range(6)] + [KeyError("k")]))
    assert found["notes"][3:] == ["ValueError: shard 3, at mine.py:2", "and 3 more in the group"]
    assert describe(ExceptionGroup("x", [KeyError("k")]))["notes"] == ["KeyError: 'k'"]


def test_a_message_of_any_length_is_cut():
    assert len(describe(ValueError("x" * 1_000_000))["message"]) == 256 * 1024


def test_an_exception_that_cannot_say_what_it_is_does_not_break_the_record():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError

    assert describe(MuteError())["message"] == "its message cannot be made: RuntimeError"


def test_the_place_is_the_users_line_below_compiled_code_and_packages(here):
    (here / "mine.py").write_text("import json\ndef work():\n    json.loads('')\n")
    scope = {}
    exec(compile((here / "mine.py").read_text(), str(here / "mine.py"), "exec"), scope)  # noqa: S102
    found = raised(scope["work"])
    assert (found["file"], found["line"]) == (str(here / "mine.py"), 3)


def test_a_refused_connection_comes_from_a_socket_and_an_empty_file_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()
    assert raised(lambda: socket.create_connection(free))["causes"][0]["origin"] == CONNECTION
    assert not raised(lambda: pickle.load(io.BytesIO()))["causes"][0]["origin"]  # noqa: S301


def test_every_exception_of_the_chain_is_told():
    def receive():
        raise RuntimeError("[x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711")

    def work():
        try:
            receive()
        except RuntimeError as error:
            raise KeyError("loss") from error

    first, second = raised(work)["causes"]
    assert (first["type"], first["origin"]) == ("KeyError", "")
    assert (second["type"], second["origin"]) == ("RuntimeError", TORCH)


def test_only_connections_whose_other_end_is_gone_are_broken():
    before = broken_connections()
    kept, other = socket.socketpair()
    with kept, other, socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        with server.accept()[0] as accepted:
            port = client.getsockname()[1]
            assert broken_connections() == before
            client.sendall(b"what was not read yet")
            client.close()
            assert accepted.fileno() != -1
            assert broken_connections() == [*before, f"local 127.0.0.1:{port}"]
        other.close()
        assert broken_connections() == [*before, "pair"]


def test_a_socket_with_a_name_may_be_another_ranks_and_one_without_is_that_of_a_child(here):
    before = broken_connections()
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("name")
        server.listen()
        client.connect("name")
        server.accept()[0].close()
        assert broken_connections() == [*before, "local"]
    ours, childs = multiprocessing.Pipe()
    childs.close()
    with ours:
        assert broken_connections() == [*before, "pair"]


def test_looking_at_a_connection_takes_no_byte_from_it():
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"seven")
        broken_connections()
        assert one.recv(5) == b"seven"


def test_the_line_in_the_users_folder_is_named_rather_than_that_of_a_framework_that_is_no_package(here):
    def load(name, text):
        scope, path = {}, here / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        exec(compile(text, str(path), "exec"), scope)  # noqa: S102
        return scope

    framework = load("framework/fit.py", "def call(function):\n    function(1)\n")
    package = load("mine/.venv/site-packages/lib.py", "def load(_):\n    return int('x')\n")
    mine = load("mine/code/train.py", "def work(call, function):\n    call(function)\n")
    for function, raising in (
        (lambda: None, f"raised at {here}/framework/fit.py:2, in call"),
        (package["load"], "raised at lib.py:2, in load"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            mine["work"](framework["call"], function)
        trace = caught.value.__traceback__.tb_next  # without this file's own frame
        place = place_of(trace, str(here / "mine"))
        assert (str(here / "mine/code/train.py"), 2) == place
        assert raising == raised_elsewhere(trace, place)
    assert raised_elsewhere(trace, ("lib.py", 2)) is not None
    assert raised_elsewhere(trace, (str(here / "mine/.venv/site-packages/lib.py"), 2)) is None
