"""Orders come as datagrams; whatever is none for this worker is dropped."""

import queue
import socket

import pytest

from ttlaunch import contract
from ttlaunch.agent.worker_orders import order_to_save
from ttlaunch.membership.messages import Dismiss, Finish, Member, Prepare, order_to_json
from ttlaunch.runtime.elastic.orders import MOST_BYTES, OrdersSocket

OWN = Member(3, 1)


@pytest.fixture
def orders(tmp_path):
    taken = queue.Queue()
    orders = OrdersSocket(tmp_path, OWN, take=taken.put, abandon=lambda: taken.put("abandoned"))
    path = str(tmp_path / contract.orders_socket(3))
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    yield lambda data: sender.sendto(data, path), taken, orders
    orders.close()
    sender.close()


def test_what_is_no_order_for_this_worker_is_dropped(orders):
    send, taken, socket_of_orders = orders
    others = [order_to_json(other, Prepare(1)).encode() for other in (Member(3, 0), Member(2, 1))]
    long = order_to_json(OWN, Dismiss("x")).encode() + b" " * MOST_BYTES
    bad = [b"", b"{", b"[]", b'{"kind": "prepare"}', b'{"kind": "run", "to": {"number": 3, "incarnation": 1}}', long]
    for data in [*bad, *others]:
        send(data)
    for message in (Prepare(2), Dismiss("go"), Finish()):
        send(order_to_json(OWN, message).encode())
    assert [Prepare(2), Dismiss("go"), Finish()] == [taken.get(timeout=20) for _ in range(3)]
    assert len(bad) + len(others) == socket_of_orders.dropped
    assert taken.empty()


def test_a_socket_that_an_earlier_life_has_left_is_replaced(tmp_path):
    (tmp_path / contract.orders_socket(3)).touch()
    OrdersSocket(tmp_path, OWN, take=print, abandon=print).close()
    assert [] == list(tmp_path.iterdir())


def test_the_thread_ends_when_the_socket_is_closed(tmp_path):
    orders = OrdersSocket(tmp_path, OWN, take=print, abandon=print)
    orders.close()
    orders.thread.join(20)
    assert not orders.thread.is_alive()


def test_the_order_to_save_comes_from_whoever_finds_the_coordinator_gone(orders, tmp_path):
    _, taken, socket_of_orders = orders
    (tmp_path / contract.orders_socket(7)).touch()  # no socket
    gone = OrdersSocket(tmp_path, Member(5, 0), take=print, abandon=print)
    (tmp_path / contract.orders_socket(5)).rename(tmp_path / "kept")
    gone.close()
    (tmp_path / "kept").rename(tmp_path / contract.orders_socket(5))  # as a killed worker leaves it
    assert [3] == order_to_save(str(tmp_path))
    assert "abandoned" == taken.get(timeout=20)
    assert 0 == socket_of_orders.dropped
    assert [] == order_to_save(str(tmp_path / "absent"))
