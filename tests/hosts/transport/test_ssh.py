"""Connections over SSH: what keeps them from coming about, what sshd allows on them, and what is said when they end."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.keeper import wait_until
from tests.hosts.transport.listener import keep_open, listener
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.pushed import start_script
from ttlaunch.hosts.transport.transport import run

# What keeps a connection from coming about


def test_a_name_that_means_nothing_is_named(loopback_sshd, named, check):
    check(
        named("no-such-host.invalid", user=loopback_sshd.user),
        loopback_sshd,
        """
        unknown name: no address for `no-such-host.invalid`
        hint: `getent hosts no-such-host.invalid` must print an address
        """,
    )


def test_a_closed_port_is_named(loopback_sshd, named, check):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        check(
            named("127.0.0.1", user=loopback_sshd.user, port=port),
            loopback_sshd,
            f"""
            unreachable: connection refused on port {port}
            hint: try it by hand: `ssh -o BatchMode=yes -p {port} USER@127.0.0.1 true`
            """,
        )


def test_a_host_that_accepts_and_says_nothing_is_given_up_at_the_deadline(loopback_sshd, named, check):
    began = time.monotonic()
    with listener(keep_open) as port:
        check(
            named("127.0.0.1", user=loopback_sshd.user, port=port),
            loopback_sshd,
            f"""
            silent: accepts connections on port {port} and sends nothing within 0.7 s
            hint: try it by hand: `ssh -o BatchMode=yes -p {port} USER@127.0.0.1 true`
            """,
            timeout_s=0.7,
        )
    assert time.monotonic() - began < 3


def test_a_host_that_stops_after_its_greeting_is_given_up_at_the_deadline(loopback_sshd, named, check):
    def greet(connection, stop):
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        stop.wait(30)

    with listener(greet) as port:
        check(
            named("127.0.0.1", user=loopback_sshd.user, port=port),
            loopback_sshd,
            f"""
            silent: accepts connections on port {port} and agrees on no keys within 0.7 s
            hint: try it by hand: `ssh -o BatchMode=yes -p {port} USER@127.0.0.1 true`
            """,
            timeout_s=0.7,
        )


def test_something_else_on_the_port_is_quoted(loopback_sshd, named, check):
    def web(connection, stop):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        stop.wait(30)

    with listener(web) as port:
        check(
            named("127.0.0.1", user=loopback_sshd.user, port=port),
            loopback_sshd,
            f"""
            silent: is not an SSH server on port {port}: it sends `HTTP/1.1 400 Bad Request`
            hint: try it by hand: `ssh -o BatchMode=yes -p {port} USER@127.0.0.1 true`
            """,
        )


def test_a_host_that_always_hangs_up_is_tried_again_and_then_named(loopback_sshd, named):
    with listener(lambda connection, stop: connection.sendall(b"Exceeded MaxStartups\r\n")) as port:
        transport = named("127.0.0.1", user=loopback_sshd.user, port=port)
        with pytest.raises(HostError) as caught:
            transport.connect(timeout_s=1)
    assert caught.value.trouble is Trouble.SILENT
    assert caught.value.evidence == (
        f"accepts connections on port {port} and closes them without an answer but `Exceeded MaxStartups`"
    )
    assert int(caught.value.notes[0].split()[1]) > 1


def test_the_configured_time_limit_counts_when_it_is_the_shorter_one(loopback_sshd, user, named):
    user.configure("ConnectTimeout 1\n")
    began = time.monotonic()
    with listener(keep_open) as port:
        transport = named("127.0.0.1", user=loopback_sshd.user, port=port)
        with pytest.raises(HostError) as caught:
            transport.connect(timeout_s=20)
    assert caught.value.evidence == f"accepts connections on port {port} and sends nothing within 1 s"
    assert time.monotonic() - began < 5


# What sshd allows


def test_a_host_that_runs_one_command_a_connection_still_runs_many(start_sshd, reach):
    transport = reach(start_sshd(MaxSessions=1))
    transport.connect()
    processes = [transport.start("cat", timeout_s=20) for _ in range(6)]
    for process in processes:
        process.close_stdin()
    assert {process.wait(timeout_s=20) for process in processes} == {0}


def test_many_short_commands_get_through_where_few_may_run_at_once(start_sshd, reach):
    transport = reach(start_sshd(MaxSessions=2))
    transport.connect()
    answers = []

    def ask():
        answers.extend(run(transport, "echo x", timeout_s=60).stdout for _ in range(10))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == [b"x\n"] * 40


def test_a_host_that_runs_no_command_says_so(start_sshd, reach):
    transport = reach(start_sshd(MaxSessions=0))
    transport.connect()
    with pytest.raises(HostError) as caught:
        transport.start("true", timeout_s=10)
    assert caught.value.trouble is Trouble.LOGIN
    assert caught.value.evidence == "accepts the login but opens no channel for a command"


def test_a_burst_of_connections_gets_through_a_host_that_drops_bursts(start_sshd, user, named):
    sshd = start_sshd(MaxStartups="1:100:1")
    user.trust(sshd)
    transports = [named("127.0.0.1", user=sshd.user, port=sshd.port) for _ in range(8)]
    failed = []

    def connect(transport):
        try:
            transport.connect(timeout_s=20)
        except HostError as error:
            failed.append(error.evidence)

    threads = [threading.Thread(target=connect, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []


def test_a_greeting_of_the_login_shell_is_no_output(start_sshd, reach):
    sshd = start_sshd(ForceCommand='echo welcome; echo to the machine >&2; eval "$SSH_ORIGINAL_COMMAND"')
    completed = run(reach(sshd), "printf hello; printf oops >&2", timeout_s=10)
    assert (completed.stdout, completed.stderr) == (b"hello", b"oops")


def test_a_host_that_runs_something_else_instead_is_quoted(start_sshd, reach):
    transport = reach(start_sshd(ForceCommand="echo 'This account is closed.'"))
    with pytest.raises(HostError) as caught:
        run(transport, "true", timeout_s=10)
    assert caught.value.trouble is Trouble.SCRIPT
    assert caught.value.evidence == "the login shell runs no commands and prints `This account is closed.`"


@pytest.mark.parametrize("ask", ["a command", "a script"])
@pytest.mark.parametrize(
    ("shell", "how"),
    [
        ("/bin/false", ", ends with status 1 and prints nothing"),
        ("/bin/true", ", ends with status 0 and prints nothing"),
        ("/usr/sbin/nologin", " and prints `This account is currently not available.`"),
    ],
)
def test_a_login_shell_that_runs_nothing_is_named_with_what_to_do(start_sshd, reach, shell, how, ask):
    transport = reach(start_sshd(ForceCommand=f"exec {shell}"))
    transport.connect()

    def answer():
        if ask == "a command":
            return run(transport, "true", timeout_s=10)
        return start_script(transport, "probe", timeout_s=10).expect(timeout_s=10)

    with pytest.raises(HostError) as caught:
        answer()
    assert caught.value.trouble is Trouble.SCRIPT
    assert caught.value.evidence == f"the login shell runs no commands{how}"
    assert caught.value.hints == (
        (
            "`getent passwd USER` on the host names the login shell: /bin/false and nologin run nothing; "
            "`usermod --shell /bin/bash USER` sets another"
        ),
        "or look at `ForceCommand` of its sshd",
    )


# A connection that ends


def test_a_connection_that_is_cut_is_lost_to_everything_on_it(start_sshd, reach):
    sshd = start_sshd()
    transport = reach(sshd)
    transport.connect()
    process = transport.start("cat", timeout_s=10)
    process.write(b"x", timeout_s=10)
    assert process.read(timeout_s=10) == b"x"
    pid = int(run(transport, "echo $PPID", timeout_s=10).stdout)
    os.kill(_ancestor(pid, below=sshd), signal.SIGKILL)
    for call in (
        lambda: process.read(timeout_s=10),
        lambda: process.wait(timeout_s=10),
        lambda: process.write(b"x", timeout_s=10),
        lambda: transport.start("true", timeout_s=10),
    ):
        with pytest.raises(HostError) as caught:
            call()
        assert (caught.value.trouble, caught.value.evidence) == (
            Trouble.LOST,
            "the connection broke: the host hung up",
        )


def test_a_lost_connection_can_be_made_anew(start_sshd, reach):
    sshd = start_sshd()
    transport = reach(sshd)
    transport.connect()
    pid = int(run(transport, "echo $PPID", timeout_s=10).stdout)
    os.kill(_ancestor(pid, below=sshd), signal.SIGKILL)
    with pytest.raises(HostError):
        run(transport, "true", timeout_s=10)
    transport.connect()
    assert run(transport, "echo again", timeout_s=10).stdout == b"again\n"


def test_a_connection_that_breaks_while_a_command_is_sent_is_lost_and_not_silently_replaced(start_sshd, reach):
    """The sender notices before the thread that reads: it can no longer send, and nothing has arrived yet."""
    sshd = start_sshd()
    transport = reach(sshd)
    transport.connect()
    session = _ancestor(int(run(transport, "echo $PPID", timeout_s=10).stdout), below=sshd)
    (connection,) = transport._connections
    os.kill(session, signal.SIGSTOP)
    connection.transport.sock.shutdown(socket.SHUT_WR)
    try:
        with pytest.raises(HostError, match="the connection broke"):
            run(transport, "true", timeout_s=10)
    finally:
        os.kill(session, signal.SIGKILL)


def _ancestor(pid, *, below):
    """The sshd of a session: going up from a process, the last one before the sshd that listens."""
    while True:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if str(below.folder) in Path(f"/proc/{parent}/cmdline").read_text():
            return pid
        pid = parent


def test_the_library_prints_nothing_whatever_happens(start_sshd, reach, capfd):
    sshd = start_sshd()
    transport = reach(sshd)
    transport.connect()
    pid = int(run(transport, "echo $PPID", timeout_s=10).stdout)
    os.kill(_ancestor(pid, below=sshd), signal.SIGKILL)
    with pytest.raises(HostError):
        run(transport, "true", timeout_s=10)
    assert capfd.readouterr() == ("", "")


def test_the_speed_of_the_network_is_known_once_there_is_a_connection(reach, loopback_sshd):
    transport = reach(loopback_sshd)
    assert transport.bytes_per_s is None
    transport.connect()
    assert transport.bytes_per_s > 1e6


def test_addresses_are_those_of_the_connection(reach, loopback_sshd):
    transport = reach(loopback_sshd)
    assert transport.addresses is None
    transport.connect()
    assert transport.addresses == ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    "rubbish",
    [
        b"SSH-2.0-x\r\n" + bytes(range(256)) * 40,
        b"SSH-2.0-x\r\n\0\0\0\x0c\x0a\x14" + b"\xff" * 300,
        b"SSH-2.0-x\r\n\xff\xff\xff\xff" + b"x" * 1000,
        b"SSH-1.5-ancient\r\n",
        b"\xff\xfe\xfd\r\n" * 3,
        b"hello\r\n",
    ],
)
def test_a_host_that_talks_rubbish_is_an_error_like_any_other(loopback_sshd, named, rubbish, capfd):
    with listener(lambda connection, stop: connection.sendall(rubbish)) as port:
        transport = named("127.0.0.1", user=loopback_sshd.user, port=port)
        with pytest.raises(HostError) as caught:
            transport.connect(timeout_s=3)
    assert caught.value.trouble is Trouble.SILENT
    assert capfd.readouterr() == ("", "")


def test_attempts_that_come_to_nothing_leave_nothing_open(loopback_sshd, user, named, descriptors):
    user.trust(loopback_sshd).know("")

    def fail(port):
        with pytest.raises(HostError):
            named("127.0.0.1", user=loopback_sshd.user, port=port).connect(timeout_s=0.3)

    fail(loopback_sshd.port)
    before = descriptors()
    with listener(keep_open) as silent, listener(lambda *_: None) as hangs_up:
        for port in (loopback_sshd.port, silent, hangs_up, 1):
            fail(port)
    wait_until(lambda: descriptors() <= before, what="every file is closed again")


def _connect_in_vain(transport):
    with pytest.raises(HostError):
        transport.connect(timeout_s=1)


def test_closing_while_it_connects_leaves_nothing_open(loopback_sshd, named, descriptors):
    before = descriptors()
    with listener(keep_open) as port:
        transport = named("127.0.0.1", user=loopback_sshd.user, port=port)
        thread = threading.Thread(target=_connect_in_vain, args=(transport,))
        thread.start()
        transport.close()
        thread.join(10)
    wait_until(lambda: descriptors() <= before, what="every file is closed again")
