"""What every `Transport` promises, over a real sshd, on this machine and in memory."""

import shlex
import threading
import time

import pytest

from tests.cluster.keeper import wait_until
from tests.hosts.transport.programs import BIG
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.transport import run

NASTY = [
    "plain",
    "two words",
    "it's",
    'say "hi"',
    "$HOME `id` $(id)",
    "a;b|c&d>e<f",
    "back\\slash \\n \\0101",
    "!! !x",
    "%s %d 100%",
    "#no comment ~ {a,b} [x]* ?",
    "line one\nline two\n",
    "tab\tand ünïcode ✓",
    "-n",
]


def trouble(call):
    """What a call that must fail says."""
    with pytest.raises(HostError) as caught:
        call()
    return caught.value.trouble, caught.value.evidence


def read_all(process, *, timeout_s=20):
    parts = []
    while part := process.read(timeout_s=timeout_s):
        parts.append(part)
    return b"".join(parts)


def test_connecting_twice_is_as_good_as_once(host):
    host.transport.connect()
    host.transport.connect()
    assert run(host.transport, host.line("print", "x"), timeout_s=10).stdout == b"x"


def test_a_command_reads_and_prints(host):
    process = host.start("cat")
    process.write(b"hello", timeout_s=10)
    assert process.read(timeout_s=10) == b"hello"
    process.close_stdin()
    assert process.read(timeout_s=10) == b""
    assert process.wait(timeout_s=10) == 0


@pytest.mark.parametrize("status", [0, 1, 77, 255])
def test_a_command_ends_with_its_status(host, status):
    assert run(host.transport, host.line("fail", status), timeout_s=10).status == status


def test_a_command_that_a_signal_ends_has_128_and_its_number(host):
    assert run(host.transport, host.line("crash"), timeout_s=10).status == 137


def test_standard_error_is_kept_apart(host):
    completed = run(host.transport, host.line("complain"), timeout_s=10)
    assert (completed.status, completed.stdout, completed.stderr) == (3, b"", b"oops")


def test_a_command_that_does_not_exist_ends_with_127(host):
    completed = run(host.transport, "no-such-program", timeout_s=10)
    assert completed.status == 127
    assert b"not found" in completed.stderr


def test_much_data_goes_both_ways_at_the_same_time(host):
    data = bytes(range(256)) * (BIG // 256)
    assert run(host.transport, host.line("cat"), stdin=data, timeout_s=60).stdout == data


def test_much_on_standard_error_does_not_block_standard_output(host):
    completed = run(host.transport, host.line("shout", BIG), timeout_s=60)
    assert completed.stdout == b"done"
    assert len(completed.stderr) == 64 * 1024


def test_what_a_command_does_not_read_is_no_error(host):
    completed = run(host.transport, host.line("first"), stdin=b"x" * BIG, timeout_s=60)
    assert (completed.status, completed.stdout) == (0, b"x")


def test_reading_takes_no_more_than_asked_for(host):
    process = host.start("many", 10)
    parts = []
    while part := process.read(4, timeout_s=10):
        parts.append(len(part))
    assert max(parts) <= 4
    assert sum(parts) == 10


def test_fifty_commands_run_at_once(host):
    processes = [host.start("cat") for _ in range(50)]
    for number, process in enumerate(processes):
        process.write(str(number).encode(), timeout_s=20)
        process.close_stdin()
    assert [read_all(process) for process in processes] == [str(number).encode() for number in range(50)]
    assert {process.wait(timeout_s=20) for process in processes} == {0}


def test_threads_may_share_a_transport(host):
    answers = {}

    def ask(number):
        answers[number] = run(host.transport, host.line("print", number), timeout_s=30).stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {number: str(number).encode() for number in range(12)}


def test_one_thread_may_write_while_another_reads(host):
    process = host.start("cat")
    writer = threading.Thread(target=lambda: (process.write(b"y" * BIG, timeout_s=60), process.close_stdin()))
    writer.start()
    assert len(read_all(process)) == BIG
    writer.join(60)
    assert not writer.is_alive()


def test_reading_from_a_silent_command_ends_at_the_deadline(host):
    process = host.start("cat")
    began = time.monotonic()
    assert trouble(lambda: process.read(timeout_s=0.3)) == (
        Trouble.TIMED_OUT,
        "no answer from a command within 0.3 s",
    )
    assert 0.25 < time.monotonic() - began < 3
    process.write(b"late", timeout_s=10)
    assert process.read(timeout_s=10) == b"late"


def test_waiting_for_a_command_that_goes_on_ends_at_the_deadline(host):
    process = host.start("cat")
    assert trouble(lambda: process.wait(timeout_s=0.2)) == (Trouble.TIMED_OUT, "a command is still running after 0.2 s")


def test_writing_to_a_command_that_reads_nothing_ends_at_the_deadline(host):
    process = host.start("deaf")
    began = time.monotonic()
    assert trouble(lambda: process.write(bytes(10 * BIG), timeout_s=0.5)) == (
        Trouble.TIMED_OUT,
        "a command has not read its input within 0.5 s",
    )
    assert time.monotonic() - began < 5


def test_writing_to_a_command_that_has_ended_says_so(host):
    process = host.start("fail", 0)
    assert process.wait(timeout_s=10) == 0
    assert trouble(lambda: process.write(bytes(BIG), timeout_s=10)) == (
        Trouble.LOST,
        "the command no longer reads its input",
    )


def test_running_a_command_that_does_not_end_names_it(host):
    line = host.line("deaf")
    assert trouble(lambda: run(host.transport, line, timeout_s=0.5)) == (
        Trouble.TIMED_OUT,
        f"`{line}` has not ended within 0.5 s",
    )


def test_a_killed_command_has_nothing_more_to_say(host):
    process = host.start("cat")
    process.kill()
    process.kill()
    assert process.read(timeout_s=10) == b""


def test_killing_wakes_a_thread_that_reads(host):
    process = host.start("cat")
    answers = []
    reader = threading.Thread(target=lambda: answers.append(process.read(timeout_s=60)))
    reader.start()
    process.kill()
    reader.join(20)
    assert answers == [b""]


def test_closing_ends_what_runs_and_may_be_repeated(host):
    process = host.start("cat")
    host.transport.close()
    host.transport.close()
    with pytest.raises(HostError):
        process.write(bytes(BIG), timeout_s=10)


def test_nothing_stays_open(host, descriptors):
    run(host.transport, host.line("print", "warm"), timeout_s=10)
    before = descriptors()
    for _ in range(5):
        run(host.transport, host.line("complain"), timeout_s=10)
        host.start("cat").kill()
    wait_until(lambda: descriptors() <= before, what="every file is closed again")


def test_every_character_of_a_command_arrives(shell_host):
    lines = [f"printf %s {shlex.quote(text)}" for text in NASTY]
    arrived = [run(shell_host.transport, line, timeout_s=10).stdout.decode() for line in lines]
    assert arrived == NASTY


def test_a_command_is_for_a_posix_shell_and_starts_at_home(shell_host):
    completed = run(shell_host.transport, 'f() { echo "$1"; }; f "$(pwd)"; cd; pwd', timeout_s=10)
    lines = completed.stdout.decode().splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]


def test_a_mistake_in_a_command_line_is_told_by_the_shell(shell_host):
    completed = run(shell_host.transport, "if then", timeout_s=10)
    assert completed.status == 2
    assert b"yntax error" in completed.stderr
