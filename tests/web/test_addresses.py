"""Where a server listens, by which names, and with which key."""

import os
from pathlib import Path

import pytest

from ttlaunch.web.addresses import KeyRefusedError, allowed_names, draw_key, is_loopback, listen, read_key


def test_only_this_machine_reaches_loopback():
    assert [True, True, True, False, False, False] == [
        is_loopback(host)
        for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "localhost.example")  # noqa: S104
    ]


def test_the_names_are_the_loopback_ones_the_address_and_those_of_the_user():
    assert {"127.0.0.1", "localhost", "[::1]", "10.0.0.1", "box.lan"} == allowed_names("10.0.0.1", ["Box.lan"])
    assert "[fe80::1]" in allowed_names("fe80::1", [])


def key_file(tmp_path, text, mode=0o600):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_is_read_from_a_file_of_this_user_alone(tmp_path):
    key = draw_key()
    assert key == read_key(key_file(tmp_path, f"{key}\n"))


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("a" * 20, 0o640, "others can read it"),
        ("short", 0o600, "expected one line of 16 to 512"),
        ("two lines\nof words that are long", 0o600, "expected one line of 16 to 512"),
        ("é" * 20, 0o600, "expected one line of 16 to 512"),
    ],
)
def test_a_key_that_others_can_read_or_guess_is_refused(tmp_path, text, mode, expected):
    with pytest.raises(KeyRefusedError, match=expected):
        read_key(key_file(tmp_path, text, mode))
    with pytest.raises(KeyRefusedError, match="no such file"):
        read_key(tmp_path / "nothing")


def test_a_key_file_that_is_a_named_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(KeyRefusedError, match=str(path)):
            read_key(path)


def test_a_taken_port_is_an_error_of_the_system():
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="already in use"):
        listen("127.0.0.1", taken.getsockname()[1])
