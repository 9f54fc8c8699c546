"""Orders to workers of an elastic run: a datagram to the right socket, or nothing at all."""

import os
import socket

import pytest

from ttlaunch import contract
from ttlaunch.agent.worker_orders import pass_order

NUMBER = 3


@pytest.fixture
def path(tmp_path):
    return tmp_path / contract.orders_socket(NUMBER)


@pytest.fixture
def listening():
    """`listening(path)`: a socket for datagrams that is bound there."""
    made = []

    def make(path):
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        made[-1].bind(str(path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_an_order_arrives_whole_however_long_it_may_be(tmp_path, path, listening):
    worker = listening(path)
    for order in (b"begin", b"", os.urandom(contract.LARGEST_ORDER)):
        assert pass_order(str(tmp_path), NUMBER, order)
        assert order == worker.recv(1 << 20)


def test_a_worker_that_reads_nothing_gets_what_its_socket_holds_and_nobody_waits_for_it(tmp_path, path, listening):
    worker, sent = listening(path), 0
    while pass_order(str(tmp_path), NUMBER, b"%d" % sent):
        sent += 1
    assert [b"%d" % number for number in range(sent)] == [worker.recv(100) for _ in range(sent)]
    assert pass_order(str(tmp_path), NUMBER, b"later")


def test_a_worker_that_has_not_begun_or_has_ended_gets_nothing(tmp_path, path, listening):
    assert not pass_order(str(tmp_path), NUMBER, b"begin")
    listening(path).close()
    assert path.exists()
    assert not pass_order(str(tmp_path), NUMBER, b"begin")


def test_no_link_is_followed_and_nothing_but_a_socket_is_written_to(tmp_path, path, listening):
    elsewhere = listening(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    assert not pass_order(str(tmp_path), NUMBER, b"begin")
    path.unlink()
    path.write_text("a file")
    assert not pass_order(str(tmp_path), NUMBER, b"begin")
    assert "a file" == path.read_text()
    elsewhere.settimeout(0)
    with pytest.raises(BlockingIOError):
        elsewhere.recv(100)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_socket_of_another_user_gets_nothing(tmp_path, path, listening):
    worker = listening(path)
    os.chown(path, 65534, -1)
    assert not pass_order(str(tmp_path), NUMBER, b"begin")
    os.chown(path, 0, -1)
    assert pass_order(str(tmp_path), NUMBER, b"begin")
    assert b"begin" == worker.recv(100)
