"""The client of a coordinator over real sockets: whom it believes, what it sends to whom, and what it does with bad answers."""

import contextlib
import hashlib
import socket
import ssl
import threading

import pytest

from tests.running.membership.memory import FINGERPRINT, registration
from tests.running.membership.over_tls import SOON_S, Service, a_token
from ttlaunch import contract
from ttlaunch.records import coordinator as answers
from ttlaunch.running.agents.certificates import Authority, fingerprint_of, serving_context
from ttlaunch.running.membership.answers import Answer, answer
from ttlaunch.running.membership.client import (
    CoordinatorClient,
    InvitationUrl,
    NoAnswerError,
    Problem,
    RefusedError,
    client_on_unix_socket,
    client_over_tls,
    fetch_authority,
    parse_invitation_url,
)
from ttlaunch.running.membership.http_service import HttpService, listen_on_unix_socket

A_HASH = "0123456789abcdef" * 4


@pytest.fixture
def service():
    with Service() as service:
        yield service


def url_of(service, authority=None):
    return InvitationUrl("127.0.0.1", service.port, (authority or service.authority).sha256)


def client_of(service, token):
    url = url_of(service)
    return client_over_tls(url, fetch_authority(url), token=token)


@contextlib.contextmanager
def saying(*pieces, pause_s=0.0):
    """A client of a server that sends these bytes whatever it is asked; it keeps the connection open afterwards."""
    ours, theirs = socket.socketpair()
    is_over = threading.Event()

    def say():
        with contextlib.suppress(OSError):
            theirs.recv(65536)
            for piece in pieces:
                theirs.sendall(piece)
                is_over.wait(pause_s)

    thread = threading.Thread(target=say)
    thread.start()
    try:
        yield CoordinatorClient(lambda _: ours)
    finally:
        is_over.set()
        theirs.close()
        thread.join(SOON_S)
        ours.close()


@pytest.mark.parametrize("host", ["10.0.0.1", "gpu-01.example", "fe80::1"])
def test_an_invitation_is_read_as_it_is_written(host):
    url = InvitationUrl(host, 7000, A_HASH)
    assert parse_invitation_url(str(url)) == url


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gpu-01:7000", "it does not begin with `https://`"),
        (f"http://gpu-01:7000#{A_HASH}", "it does not begin with `https://`"),
        (f"https://gpu-01#{A_HASH}", "it has no host and port"),
        (f"https://gpu-01:0#{A_HASH}", "it has no host and port"),
        (f"https://gpu-01:99999#{A_HASH}", "it is no address of the form https://HOST:PORT#SHA256"),
        (f"https://fd00:0::1:7000#{A_HASH}", "an IPv6 address stands in brackets: `[fd00::1]:7000`"),
        (f"https://[gpu-01:7000#{A_HASH}", "it is no address of the form https://HOST:PORT#SHA256"),
        (f"https://me:secret@gpu-01:7000#{A_HASH}", "it is not of the form https://HOST:PORT#SHA256"),
        (f"https://gpu-01:7000/run#{A_HASH}", "it is not of the form https://HOST:PORT#SHA256"),
        ("https://gpu-01:7000", "it does not end in `#` and the 64 digits by which the run's certificate is known"),
        ("https://gpu-01:7000#ab", "it does not end in `#` and the 64 digits by which the run's certificate is known"),
    ],
)
def test_what_is_no_invitation_is_refused_with_the_rule(text, reason):
    assert parse_invitation_url(text) == reason


def test_a_worker_registers_with_the_certificate_that_the_invitation_names(service):
    client = client_of(service, a_token(service))
    body = registration()
    welcome = client.ask(answers.Welcome, "POST", "/workers/register", body=body)
    assert (welcome.worker_id, welcome.run_id) == ("worker-0000", "2026-08-23T10-14-07")
    client.close()


def test_one_connection_serves_many_requests(service):
    client = client_of(service, a_token(service))
    opened = []
    first = client._open_socket
    client._open_socket = lambda timeout_s: opened.append(1) or first(timeout_s)
    for _ in range(3):
        assert client.ask(answers.RunDescription, "GET", "/run").recipe == "data_parallel"
    assert opened == [1]
    client.close()


def test_a_client_connects_again_after_the_coordinator_has_closed_the_connection(service):
    client = client_of(service, a_token(service))
    client.ask(answers.RunDescription, "GET", "/run")
    for connection in list(service.http._open):
        connection.close()
    with pytest.raises(NoAnswerError):
        client.ask(answers.RunDescription, "GET", "/run")
    assert client.ask(answers.RunDescription, "GET", "/run").recipe == "data_parallel"
    client.close()


def test_a_connection_that_was_idle_for_long_is_not_used_again(service, monkeypatch):
    """The coordinator closes it, so a machine that compares itself for long would register over a closed one."""
    client = client_of(service, a_token(service))
    client.ask(answers.RunDescription, "GET", "/run")
    monkeypatch.setattr("ttlaunch.running.membership.client._IDLE_S", 0.0)
    for connection in list(service.http._open):
        connection.close()
    assert client.ask(answers.RunDescription, "GET", "/run").recipe == "data_parallel"
    client.close()


@pytest.mark.parametrize(("closed", "is_reached"), [(2, True), (3, False)])
def test_a_connection_that_is_closed_while_hands_are_shaken_is_tried_again(service, monkeypatch, closed, is_reached):
    monkeypatch.setattr("ttlaunch.running.membership.client._PAUSE_S", 0.0)
    client, tries = client_of(service, a_token(service)), []
    really = client._open_socket

    def open_socket(timeout_s):
        tries.append(timeout_s)
        if len(tries) <= closed:
            raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol")
        return really(timeout_s)

    client._open_socket = open_socket
    with contextlib.nullcontext() if is_reached else pytest.raises(NoAnswerError):
        assert client.ask(answers.RunDescription, "GET", "/run").recipe == "data_parallel"
    assert len(tries) == 3
    client.close()


def test_another_authority_than_the_invitation_names_is_refused_before_a_token_is_sent(service):
    with pytest.raises(NoAnswerError) as refused:
        fetch_authority(url_of(service, Authority()))
    assert refused.value.problem is Problem.STRANGER


def test_a_certificate_behind_the_named_one_is_not_trusted(service):
    """Base64 that ends in `=` stops the decoder, so a text of two certificates has the digest of its first one."""
    mine = Authority()
    named = next(one for one in (Authority() for _ in range(100)) if "=" in one.certificate)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    both = Answer(200, {"authority": named.certificate + mine.certificate})
    tls = serving_context(mine.issue([contract.COORDINATOR_NAME]))
    with HttpService(listener, lambda _: both, tls=tls):
        url = InvitationUrl("127.0.0.1", port, fingerprint_of(named.certificate))
        client = client_over_tls(url, fetch_authority(url), token=A_HASH)
        with pytest.raises(NoAnswerError) as refused:
            client.ask(answers.Authority, "GET", "/authority")
    assert refused.value.problem is Problem.STRANGER


def test_a_worker_with_a_certificate_of_the_run_cannot_pass_for_the_coordinator(service):
    listener = socket.create_server(("127.0.0.1", 0))
    tls = serving_context(service.authority.issue([contract.peer_name(7)]))
    with HttpService(listener, lambda request: answer(request, service.coordinator), tls=tls):
        url = InvitationUrl("127.0.0.1", listener.getsockname()[1], service.authority.sha256)
        client = client_over_tls(url, fetch_authority(url), token=A_HASH)
        with pytest.raises(NoAnswerError) as refused:
            client.ask(answers.RunDescription, "GET", "/run")
    assert refused.value.problem is Problem.STRANGER


def test_a_refusal_has_the_status_and_what_differs(service):
    other = answers.Fingerprint(**{**vars(FINGERPRINT), "torch": "2.12.0+cu126"})
    client = client_of(service, a_token(service))
    with pytest.raises(RefusedError, match="differs from the run in torch") as refused:
        client.ask(answers.Welcome, "POST", "/workers/register", body=registration(fingerprint=other))
    assert refused.value.status == 409
    (difference,) = refused.value.refusal.differences
    assert (difference.field, difference.run, difference.worker) == ("torch", "2.13.0+cpu", "2.12.0+cu126")
    client.close()


def test_nobody_at_the_address_is_named():
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    with pytest.raises(NoAnswerError, match="the connection is refused") as refused:
        fetch_authority(InvitationUrl("127.0.0.1", port, A_HASH))
    assert refused.value.problem is Problem.UNREACHABLE


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nno json!!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\n[1,2]",
        b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n" + b"[" * 5_000_000,
        b'HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n{"authority": ' + b"[" * 199_986,
    ],
)
def test_what_is_no_answer_of_a_coordinator_is_refused(said):
    with saying(said) as client, pytest.raises(NoAnswerError):
        client.ask(answers.Authority, "GET", "/authority", within_s=SOON_S)


def test_an_answer_that_comes_byte_by_byte_ends_with_the_deadline():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    with saying(head, *[b"{"] * 1000, pause_s=0.1) as client, pytest.raises(NoAnswerError, match="in time"):
        client.ask(answers.Authority, "GET", "/authority", within_s=0.5)


def test_a_closing_answer_is_read_to_its_end():
    text = b'{"authority": "' + b"x" * 300_000 + b'"}'
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text)
    with saying(head, text) as client:
        found = client.ask(answers.Authority, "GET", "/authority", within_s=SOON_S)
    assert len(found.authority) == 300_000


def test_the_owner_asks_over_the_unix_socket(service, tmp_path):
    path = tmp_path / "coordinator.sock"
    with HttpService(listen_on_unix_socket(str(path)), lambda request: answer(request, service.coordinator)):
        client = client_on_unix_socket(str(path))
        made = client.ask(answers.GivenInvitation, "POST", "/invitations", body={"valid_s": 60.0})
        listed = client.ask(answers.Invitations, "GET", "/invitations")
        client.close()
    assert [one.id for one in listed.invitations] == [made.id]


def test_a_socket_on_which_nobody_listens_is_unreachable(tmp_path):
    with pytest.raises(NoAnswerError, match="no such file"):
        client_on_unix_socket(str(tmp_path / "nothing")).ask(answers.Workers, "GET", "/workers")


def test_the_digest_of_an_invitation_is_that_of_the_certificate(service):
    der = fetch_authority(url_of(service))
    assert hashlib.sha256(der).hexdigest() == service.authority.sha256
    assert der == ssl.PEM_cert_to_DER_cert(service.authority.certificate)
