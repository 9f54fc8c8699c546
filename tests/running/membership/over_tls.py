"""A coordinator in memory that really listens, with TLS."""

import http.client
import json
import socket
import ssl
import time

from tests.running.membership.memory import coordinator_in_memory, invited
from ttlaunch import contract
from ttlaunch.running.agents.certificates import Authority, serving_context
from ttlaunch.running.membership.answers import answer
from ttlaunch.running.membership.http_service import HttpService

SOON_S = 60.0  # how long a test waits for what has to happen


class Service:
    """A coordinator in memory that listens on loopback with a certificate of its own authority."""

    def __init__(self, **options):
        self.authority = Authority()
        self.coordinator = coordinator_in_memory(authority=self.authority)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        tls = serving_context(self.authority.issue(["127.0.0.1", contract.COORDINATOR_NAME]))
        self.http = HttpService(listener, lambda request: answer(request, self.coordinator), tls=tls, **options)

    def __enter__(self):
        self.http.start()
        return self

    def __exit__(self, *_):
        self.http.close()

    def client(self):
        context = ssl.create_default_context(cadata=self.authority.certificate)
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=SOON_S)

    def ask(self, method, target, body=None, token=None):
        client = self.client()
        try:
            return exchange(client, method, target, body, token)
        finally:
            client.close()


def exchange(client, method, target, body=None, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    client.request(method, target, None if body is None else json.dumps(body), headers)
    found = client.getresponse()
    return found.status, json.loads(found.read()), found.headers


def a_token(service):
    return invited(service.coordinator, now=time.monotonic())
