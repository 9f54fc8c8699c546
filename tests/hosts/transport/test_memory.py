"""A host in memory breaks as asked, and as real ones do."""

import time

import pytest

from tests.hosts.transport.programs import PROGRAMS
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.memory import Faults, MemoryTransport
from ttlaunch.hosts.transport.transport import run


def made(**faults):
    return MemoryTransport("box", PROGRAMS, faults=Faults(**faults))


def error_of(call):
    with pytest.raises(HostError) as caught:
        call()
    return caught.value.trouble, caught.value.evidence


def test_a_host_that_refuses_says_what_it_was_told_to():
    refused = HostError("box", Trouble.LOGIN, "takes only passwords")
    assert error_of(made(refuses=refused).connect) == (Trouble.LOGIN, "takes only passwords")


def test_a_silent_host_takes_the_whole_deadline():
    began = time.monotonic()
    assert error_of(lambda: made(silent=True).connect(timeout_s=0.3)) == (
        Trouble.SILENT,
        "accepts connections on port 22 and sends nothing within 0.3 s",
    )
    assert time.monotonic() - began >= 0.3


def test_a_slow_host_answers_in_the_end():
    transport = made(slow_s=0.2)
    began = time.monotonic()
    transport.connect(timeout_s=5)
    assert run(transport, "print x", timeout_s=5).stdout == b"x"
    assert time.monotonic() - began >= 0.4
    assert error_of(lambda: transport.start("cat", timeout_s=0.1)) == (
        Trouble.TIMED_OUT,
        "it has not started a command within 0.1 s",
    )


def test_a_host_dies_after_so_many_bytes_and_stays_dead():
    transport = made(dies_after_bytes=100_000)
    process = transport.start("cat")
    process.write(bytes(1000), timeout_s=5)
    assert error_of(
        lambda: [process.read(timeout_s=5) and process.write(bytes(40_000), timeout_s=5) for _ in range(9)]
    ) == (
        Trouble.LOST,
        "the connection broke: the host hung up",
    )
    lost = (Trouble.LOST, "the connection broke: the host hung up")
    assert error_of(lambda: process.read(timeout_s=5)) == lost
    assert error_of(lambda: process.wait(timeout_s=5)) == lost
    assert error_of(lambda: transport.start("cat")) == lost
    assert error_of(lambda: transport.connect(timeout_s=2)) == (
        Trouble.UNREACHABLE,
        "no answer on port 22 within 2 s",
    )


def test_a_program_that_raises_ends_as_programs_do():
    def broken(streams):
        raise ZeroDivisionError("by nought")

    completed = run(MemoryTransport("box", {"broken": broken}), "broken", timeout_s=5)
    assert (completed.status, completed.stderr) == (1, b"ZeroDivisionError: by nought\n")


def test_a_program_gets_its_words_and_the_whole_of_its_input():
    def join(streams):
        streams.write(b" ".join([word.encode() for word in streams.arguments] + [streams.read()]))
        return 0

    completed = run(MemoryTransport("box", {"join": join}), "join 'a b' c", stdin=b"input", timeout_s=5)
    assert completed.stdout == b"a b c input"


def test_addresses_are_those_it_was_given():
    transport = MemoryTransport("box", {}, addresses=("10.0.0.1", "10.0.0.2"))
    assert transport.addresses == ("10.0.0.1", "10.0.0.2")
