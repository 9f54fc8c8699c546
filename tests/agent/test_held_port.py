"""The port of rank 0's store: drawn outside the ephemeral range, held against other runs, free for the store."""

import socket

import pytest

from ttlaunch.agent.held_port import FIRST, LAST, candidates, ephemeral_range, hold_port


def listen(port, *, reuse):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        server.bind(("127.0.0.1", port))
        server.listen()


def test_no_port_is_drawn_that_the_kernel_gives_to_connections():
    first, last = ephemeral_range()
    with hold_port() as held:
        port = held.getsockname()[1]
    assert FIRST <= port <= LAST
    assert not first <= port <= last


def test_a_server_that_shares_its_address_can_listen_on_a_held_port_and_no_other_can():
    with hold_port() as held:
        port = held.getsockname()[1]
        listen(port, reuse=1)
        with pytest.raises(OSError, match="in use"):
            listen(port, reuse=0)


def test_fifty_runs_at_once_draw_fifty_ports():
    held = [hold_port(range(20000, 20100)) for _ in range(50)]  # so few that draws meet
    try:
        assert 50 == len({one.getsockname()[1] for one in held})
    finally:
        for one in held:
            one.close()


def test_a_port_on_which_somebody_listens_is_not_drawn():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(OSError, match="no port"):
            hold_port([taken])


def test_a_range_that_leaves_no_ports_is_ignored():
    assert [20000, 20001] == candidates((20002, LAST))[10000:10002]
    assert list(range(FIRST, LAST + 1)) == candidates((1024, LAST))
