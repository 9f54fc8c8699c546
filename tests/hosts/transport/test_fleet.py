"""Many hosts at once: nobody waits for the slow and the dead, and a mistake of ours is not blamed on a host."""

import threading
import time

import pytest

from tests.hosts.transport.programs import PROGRAMS
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.memory import Faults, MemoryTransport
from ttlaunch.hosts.transport.transport import run

DEAD = HostError("dead", Trouble.UNREACHABLE, "connection refused on port 22")


def healthy(name):
    return MemoryTransport(name, PROGRAMS)


def greet(transport):
    transport.connect(timeout_s=5)
    return run(transport, f"print {transport.host}", timeout_s=5).stdout.decode()


def test_every_host_answers_with_what_the_work_returns():
    answers = {
        transport.host: answer for transport, answer in on_each([healthy("a"), healthy("b")], greet, timeout_s=9)
    }
    assert answers == {"a": "a", "b": "b"}


def test_no_hosts_are_no_work():
    assert list(on_each([], greet, timeout_s=1)) == []


def test_a_dead_and_a_slow_host_do_not_delay_the_others():
    began = time.monotonic()
    hosts = [
        MemoryTransport("silent", PROGRAMS, faults=Faults(silent=True)),
        MemoryTransport("dead", PROGRAMS, faults=Faults(refuses=DEAD)),
        *(healthy(f"box-{number}") for number in range(6)),
    ]
    order = []
    for transport, answer in on_each(hosts, greet, timeout_s=0.6):
        order.append(transport.host)
        if transport.host == "dead":
            assert answer is DEAD
        elif transport.host == "silent":
            assert (answer.host, answer.trouble, answer.evidence) == (
                "silent",
                Trouble.TIMED_OUT,
                "no answer within 0.6 s",
            )
        else:
            assert answer == transport.host
            assert time.monotonic() - began < 0.5
    assert sorted(order) == sorted(host.host for host in hosts)
    assert order[-1] == "silent"


def test_an_answer_that_comes_too_late_is_not_given_twice():
    release, threads = threading.Event(), []

    def work(transport):
        if transport.host == "late":
            threads.append(threading.current_thread())
            release.wait(10)
        elif transport.host == "last":
            release.set()
            threads[0].join(10)  # the late answer has arrived
        return transport.host

    answers = [
        answer if isinstance(answer, str) else answer.evidence
        for _, answer in on_each([healthy("late"), healthy("last")], work, timeout_s=0.3, most_at_once=1)
    ]
    assert answers == ["no answer within 0.3 s", "last"]


def test_no_more_than_so_many_are_busy_at_a_time():
    lock, busy, most, four = threading.Lock(), [], [], threading.Barrier(4)

    def work(transport):
        with lock:
            busy.append(transport)
            most.append(len(busy))
        four.wait(10)
        with lock:
            busy.remove(transport)

    assert len(list(on_each([healthy(str(n)) for n in range(20)], work, timeout_s=9, most_at_once=4))) == 20
    assert max(most) == 4


def test_a_mistake_of_ours_is_not_blamed_on_a_host():
    def work(transport):
        raise KeyError(transport.host)

    with pytest.raises(KeyError, match="box"):
        list(on_each([healthy("box")], work, timeout_s=9))
