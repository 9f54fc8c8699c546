"""The coordinator over real sockets: TLS by the run's authority, a Unix socket for the owner, and clients that behave badly."""

import hashlib
import http.client
import json
import os
import random
import socket
import ssl
import threading
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.running.membership.memory import coordinator_in_memory, registration
from tests.running.membership.over_tls import SOON_S, Service, a_token, exchange
from tests.security.listeners import places_of
from ttlaunch.running.agents.certificates import Authority, fingerprint_of, make_request, serving_context
from ttlaunch.running.membership.answers import Answer, answer
from ttlaunch.running.membership.http_service import HttpService, listen_on_unix_socket


@pytest.fixture
def service():
    with Service() as service:
        yield service


def test_a_worker_registers_reports_and_leaves_over_tls(service):
    key, request = make_request()
    body = registration(certificate_request=request)
    status, joined, headers = service.ask("POST", "/workers/register", body, a_token(service))
    assert status == 200, joined
    assert headers["Cache-Control"] == "no-store"
    assert "BEGIN CERTIFICATE" in joined["certificate"]
    assert "PRIVATE KEY" in key
    token = joined["token"]
    client = service.client()
    for step in (1, 2):  # one connection
        body = {"incarnation": 1, "step": step}
        assert exchange(client, "POST", "/workers/worker-0000/heartbeat", body, token)[1]["order"] == "go"
    assert exchange(client, "DELETE", "/workers/worker-0000", token=token)[1] == {"leaves_after_step": 3}
    client.close()


def test_a_worker_that_waits_for_orders_has_them_at_once_and_keeps_nobody_else_waiting(service):
    token = service.ask("POST", "/workers/register", registration(), a_token(service))[1]["token"]
    found = []
    body = {"incarnation": 1, "wait_s": 20.0}
    waiting = threading.Thread(
        target=lambda: found.append(service.ask("POST", "/workers/worker-0000/heartbeat", body, token)[1])
    )
    waiting.start()
    assert service.ask("GET", "/workers", token=token)[0] == 200
    service.coordinator.members.tell(0, {"what": "prepare", "epoch": 2})
    waiting.join(SOON_S)
    assert found == [{"epoch": 1, "order": "prepare", "messages": [{"what": "prepare", "epoch": 2}]}]


def test_a_client_that_does_not_know_the_authority_refuses_the_service(service):
    client = http.client.HTTPSConnection(
        "127.0.0.1", service.port, context=ssl.create_default_context(cadata=Authority().certificate), timeout=SOON_S
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        client.request("GET", "/run")
    client.close()


def test_a_certificate_of_a_worker_does_not_prove_that_it_is_the_coordinator(service):
    proof = service.authority.issue(["rank-5"])
    listener = socket.create_server(("127.0.0.1", 0))
    with HttpService(listener, lambda _: Answer(200, {}), tls=serving_context(proof)):
        context = ssl.create_default_context(cadata=service.authority.certificate)
        client = http.client.HTTPSConnection("127.0.0.1", listener.getsockname()[1], context=context, timeout=SOON_S)
        with pytest.raises(ssl.SSLCertVerificationError):
            client.request("GET", "/run")
        client.close()


def test_a_request_for_another_name_gets_the_assigned_one_alone():
    names = x509.SubjectAlternativeName([x509.DNSName("rank-0"), x509.DNSName("10.0.0.1")])
    builder = x509.CertificateSigningRequestBuilder(x509.Name([])).add_extension(names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    request = builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    text = request.public_bytes(serialization.Encoding.PEM).decode()
    authority = Authority()
    found = x509.load_pem_x509_certificate(authority.sign(text, "rank-7").encode())
    assert found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.DNSName
    ) == ["rank-7"]
    assert found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


@pytest.mark.parametrize("curve", ["rsa", "p384", "torn", "empty"])
def test_a_request_with_another_kind_of_key_or_a_wrong_signature_is_refused(curve):
    if curve in ("rsa", "p384"):
        key = rsa.generate_private_key(65537, 2048) if curve == "rsa" else ec.generate_private_key(ec.SECP384R1())
        request = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, hashes.SHA256())
        text = request.public_bytes(serialization.Encoding.PEM).decode()
    else:
        text = make_request()[1]
        text = text.replace("MII", "AAA", 1)[: len(text) // 2] if curve == "torn" else ""
    with pytest.raises(ValueError, match=r"."):
        Authority().sign(text, "rank-7")


def test_the_hash_of_an_invitation_is_that_of_the_certificate_in_der():
    authority = Authority()
    der = x509.load_pem_x509_certificate(authority.certificate.encode()).public_bytes(serialization.Encoding.DER)
    assert fingerprint_of(authority.certificate) == authority.sha256 == hashlib.sha256(der).hexdigest()


def test_the_owner_needs_no_token_on_the_unix_socket(tmp_path):
    path = tmp_path / "coordinator"
    coordinator = coordinator_in_memory()
    with HttpService(listen_on_unix_socket(str(path)), lambda request: answer(request, coordinator)):
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(
                b'POST /invitations HTTP/1.1\r\nContent-Length: 13\r\nConnection: close\r\n\r\n{"valid_s":9}'
            )
            reply = received(connection)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert len(coordinator.tokens.invitations(0.0)) == 1


def test_a_network_without_tls_is_impossible():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(AssertionError, match="TLS"):
        HttpService(listener, lambda _: Answer(200, {})).start()


def test_it_listens_only_where_it_was_told():
    """Seen by its port: an earlier test of this process may have left a socket open, as torch's store does."""
    with Service() as service:
        listening = [str(address) for address, port in places_of([os.getpid()]) if port == service.port]
    assert listening == ["127.0.0.1"]


def received(connection):
    """Everything until the other end closes."""
    connection.settimeout(SOON_S)
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


def tls_connection(service):
    context = ssl.create_default_context(cadata=service.authority.certificate)
    return context.wrap_socket(
        socket.create_connection(("127.0.0.1", service.port), SOON_S), server_hostname="127.0.0.1"
    )


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /workers/register HTTP/1.1\r\nContent-Length: 65537\r\n\r\n", 413),
        (b"POST /workers/register HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 413),
        (b"POST /workers/register HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411),
        (b"POST /workers/register HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}", 411),
        (b"POST /workers/register HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        (b"PUT /workers HTTP/1.1\r\n\r\n", 501),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /run HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET /run HTTP/1.1\r\nAuthorization: Basic eA==\r\n\r\n", 401),
        (b"GET /run HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\r\n\r\n", 401),
    ],
)
def test_what_is_no_request_is_answered_in_json_and_the_connection_ends(service, sent, status):
    with tls_connection(service) as connection:
        connection.sendall(sent)
        reply = received(connection)
    assert reply.split(b" ", 2)[1] == str(status).encode()
    assert "error" in json.loads(reply.rpartition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("stage", ["connect", "handshake", "headers", "body"])
def test_a_slow_client_is_cut_off_after_its_deadline_and_delays_no_other(stage):
    with Service(read_s=1.0) as service:
        if stage in ("connect", "handshake"):
            slow = socket.create_connection(("127.0.0.1", service.port), SOON_S)
        else:
            slow = tls_connection(service)
        over = threading.Event()

        def drip():
            """Send a byte every tenth of a second, for ever."""
            text = {
                "handshake": b"\x16\x03\x01\x02\x00",
                "headers": b"GET /run HTTP/1.1\r\nA: ",
                "body": b"POST /run HTTP/1.1\r\nContent-Length: 60000\r\n\r\n",
            }
            try:
                slow.sendall(text[stage])
                while not over.is_set():
                    slow.sendall(b"a")
                    time.sleep(0.1)
            except OSError:
                return

        thread = threading.Thread(target=drip)
        if stage != "connect":
            thread.start()
        assert service.ask("GET", "/authority")[0] == 200
        assert received(slow) == b""
        over.set()
        if stage != "connect":
            thread.join(SOON_S)
        slow.close()


def test_many_silent_connections_from_one_address_give_way_to_the_next_one():
    with Service(most_connections=8, read_s=SOON_S) as service:
        silent = [socket.create_connection(("127.0.0.1", service.port), SOON_S) for _ in range(40)]
        assert service.ask("GET", "/authority")[0] == 200
        assert len(service.http._open) <= 8
        for connection in silent:
            connection.close()


def test_a_heartbeat_that_waits_is_not_closed_for_new_connections():
    with Service(most_connections=4, read_s=SOON_S) as service:
        token = service.ask("POST", "/workers/register", registration(), a_token(service))[1]["token"]
        found = []
        body = {"incarnation": 1, "wait_s": 20.0}
        waiting = threading.Thread(
            target=lambda: found.append(service.ask("POST", "/workers/worker-0000/heartbeat", body, token)[0])
        )
        waiting.start()
        deadline = time.monotonic() + SOON_S
        while not any(one.is_answering for one in list(service.http._open)) and time.monotonic() < deadline:
            time.sleep(0.01)
        silent = [socket.create_connection(("127.0.0.1", service.port), SOON_S) for _ in range(20)]
        service.ask("GET", "/authority")
        service.coordinator.members.tell(0, {"what": "prepare"})
        waiting.join(SOON_S)
        assert found == [200]
        for connection in silent:
            connection.close()


def test_random_bytes_end_no_service(service):
    choose = random.Random(9)  # noqa: S311 - the same bytes each time
    for _ in range(100):
        size = choose.randrange(1, 300)
        with socket.create_connection(("127.0.0.1", service.port), SOON_S) as plain:
            plain.sendall(choose.randbytes(size))
        with tls_connection(service) as inside:
            inside.sendall(
                choose.choice([b"POST /workers/register HTTP/1.1\r\n", b""]) + choose.randbytes(size) + b"\r\n\r\n"
            )
    assert service.ask("GET", "/authority")[0] == 200


def test_closing_ends_what_waits(service):
    token = service.ask("POST", "/workers/register", registration(), a_token(service))[1]["token"]
    client = service.client()
    assert exchange(client, "GET", "/workers", token=token)[0] == 200
    service.http.close()
    with pytest.raises(OSError, match=r"."):
        service.client().connect()
    with pytest.raises((http.client.HTTPException, OSError)):
        exchange(client, "GET", "/workers", token=token)
    client.close()
