"""A socket on this machine stands for that of a head elsewhere: reached by the program that a host would run, as a process here."""

import socket
import sys
import threading
import time

import pytest

from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.running.agents.distant_head import distant_head
from ttlaunch.serving import wire


class EchoingHead:
    """Greets whoever connects, and sends back what it is told; `connections` counts them."""

    def __init__(self, path):
        self.listening, self.connections, self.left = wire.listen(path), 0, threading.Semaphore(0)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                connection.sendall(b"hello\n")
                while data := connection.recv(65536):
                    connection.sendall(data)
            self.left.release()


@pytest.fixture
def places(tmp_path):
    """The paths of the head's socket and of the one here, joined until the test ends."""
    there, here = tmp_path / "there", tmp_path / "here"
    transport = LocalTransport("localhost")
    with distant_head(transport, there=str(there), here=here, python=sys.executable):
        yield there, here
    transport.close()


def connect(here):
    end = time.monotonic() + 20
    while True:
        try:
            connection = wire.connect(here)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)
        else:
            connection.settimeout(20)
            return connection


def read(connection, length):
    found = b""
    while len(found) < length and (piece := connection.recv(65536)):
        found += piece
    return found


def test_nobody_listens_here_before_the_head_answers(places):
    there, here = places
    time.sleep(0.3)
    assert not here.exists()
    EchoingHead(there)
    with connect(here) as connection:
        assert b"hello\n" == read(connection, 6)


def test_what_both_sides_say_arrives_whole(places):
    there, here = places
    EchoingHead(there)
    said = bytes(range(256)) * 4096
    with connect(here) as connection:
        assert b"hello\n" == read(connection, 6)
        threading.Thread(target=connection.sendall, args=(said,), daemon=True).start()
        assert said == read(connection, len(said))


def test_the_head_learns_that_its_asker_has_left_and_the_next_one_is_greeted(places):
    there, here = places
    head = EchoingHead(there)
    for _ in range(2):
        with connect(here) as connection:
            assert b"hello\n" == read(connection, 6)
        assert head.left.acquire(timeout=20)


def test_whoever_asks_learns_that_the_connection_is_gone_when_the_run_ends(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    transport = LocalTransport("localhost")
    with distant_head(transport, there=str(there), here=here, python=sys.executable):
        EchoingHead(there)
        connection = connect(here)
        assert b"hello\n" == read(connection, 6)
    with connection:
        assert b"" == connection.recv(1)
    with pytest.raises(OSError, match=r"No such file|refused"), socket.socket(socket.AF_UNIX) as again:
        again.connect(str(here))
    transport.close()
