"""A host that answers no more is told from one whose sshd allows few commands on a connection."""

import threading
import time

import pytest

from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.ssh import SshTransport


class _Silent:
    """A connection to a host that no longer answers: a channel is waited for until the deadline."""

    alive = True

    def open_channel(self, *, timeout_s):
        threading.Event().wait(timeout_s)


def test_a_host_that_says_nothing_is_not_taken_for_one_without_room_for_another_command(monkeypatch):
    opened = []
    monkeypatch.setattr("ttlaunch.hosts.transport.ssh.open_connection", lambda *_, **__: opened.append(1))
    transport = SshTransport(HostAddress("node0"))
    transport._connections = [_Silent()]
    with pytest.raises(TimeoutError):
        transport._channel(time.monotonic() + 0.1)
    assert [] == opened
