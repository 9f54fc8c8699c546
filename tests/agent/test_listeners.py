"""Sockets of other processes are moved to one address, and whoever is connected or connects meanwhile notices nothing."""

import socket
import subprocess
import sys
import threading

import pytest

from tests.security import forbidding
from tests.security.listeners import addresses_of
from ttlaunch.agent.listeners import LOOPBACK, Listeners, addresses_in, drop_packets

SERVER = """\
import select, socket, sys
listener = socket.socket()
for level, name, value in {options}:
    listener.setsockopt(level, name, value)
listener.bind(("0.0.0.0", {port}))
listener.listen()
listener.setblocking(False)
poll = select.epoll()
poll.register(listener, select.EPOLLIN)
print(listener.getsockname()[1], flush=True)
peers = {{}}
while True:
    for number, _ in poll.poll():
        if number == listener.fileno():
            peer, _ = listener.accept()
            poll.register(peer, select.EPOLLIN)
            peers[peer.fileno()] = peer
        elif data := peers[number].recv(100):
            peers[number].sendall(data)
        else:
            poll.unregister(peers[number])
            peers.pop(number).close()
"""
NODELAY = (int(socket.IPPROTO_TCP), int(socket.TCP_NODELAY), 1)


@pytest.fixture
def server():
    """`server(port=0, options=[])`: a process that answers what it is sent, and its port."""
    started = []

    def start(*, port=0, options=()):
        code = SERVER.format(port=port, options=list(options))
        started.append(subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE))
        return started[-1].pid, int(started[-1].stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def look(skip_or_fail):
    """`look(listeners, pid)`: let them look at a child of this process."""

    def look(listeners, pid):
        if not listeners.look(pid):
            skip_or_fail("this process may not trace its children here")

    return look


def answers(port):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"hello")
        return connection.recv(100) == b"hello"


def everywhere(pid):
    return [str(address) for address in addresses_of([pid])] == ["0.0.0.0"]  # noqa: S104 - what is expected, not bound


def test_connections_outlive_the_move_of_the_socket_that_accepted_them(server, look):
    pid, port = server()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as before:
        before.sendall(b"one")
        assert before.recv(100) == b"one"
        assert everywhere(pid)
        look(listeners := Listeners(LOOPBACK), pid)
        assert listeners.moved == 1
        assert [str(address) for address in addresses_of([pid])] == ["127.0.0.1"]
        before.sendall(b"two")
        assert before.recv(100) == b"two"
    assert answers(port)


def test_nobody_is_refused_who_connects_while_a_socket_is_moved(server, look):
    for _ in range(3):
        pid, port = server()
        stop, failed = threading.Event(), []

        def connect(port=port, stop=stop, failed=failed):
            while not stop.is_set():
                try:
                    assert answers(port)
                except (OSError, AssertionError) as error:
                    failed.append(error)

        clients = [threading.Thread(target=connect) for _ in range(4)]
        for client in clients:
            client.start()
        listeners = Listeners(LOOPBACK)
        while not listeners.moved:
            look(listeners, pid)
        stop.set()
        for client in clients:
            client.join()
        assert failed == []


def test_a_program_keeps_its_own_servers_where_they_are(server, look):
    own, _ = server()
    library, _ = server(options=[NODELAY])
    listeners = Listeners(LOOPBACK, options=[NODELAY])
    for pid in (own, library):
        look(listeners, pid)
    assert everywhere(own)
    assert not everywhere(library)


def test_a_socket_whose_port_its_process_has_chosen_listens_on_as_before(server, look):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    pid, port = server(port=chosen)
    look(listeners := Listeners(LOOPBACK), pid)
    assert (listeners.moved, everywhere(pid), port) == (0, True, chosen)
    assert answers(port)


@pytest.mark.parametrize("before", [(), (sys.executable, forbidding.__file__)], ids=["here", "in a container"])
def test_a_process_knows_whether_it_may_move_the_sockets_of_its_children(before, look, server):
    look(Listeners(LOOPBACK), server()[0])  # or this machine forbids it
    code = "from ttlaunch.agent.tracing import may_trace; print(may_trace())"
    answer = subprocess.run([*before, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == f"{not before}\n"


def test_a_socket_that_drops_packets_takes_no_further_connection_and_keeps_those_it_has():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=20) as before,
        listener.accept()[0] as accepted,
    ):
        drop_packets(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), timeout=0.2)
        before.sendall(b"still here")
        assert accepted.recv(100) == b"still here"


@pytest.mark.parametrize(
    ("networks", "address"),
    [
        ("127.0.0.0/8", "127.0.0.1"),
        ("127.0.0.1/32", "127.0.0.1"),
        ("198.51.100.0/24,127.0.0.0/8", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("198.51.100.0/24", None),
        ("eth0", None),
        ("127.0.0.0/33", None),
        ("fe80::/10", None),
        ("", None),
    ],
)
def test_a_machine_listens_on_the_only_address_that_it_has_in_the_networks(networks, address):
    expected = {} if address is None else {socket.AF_INET: address, socket.AF_INET6: "::1"}
    assert addresses_in(networks) == expected
