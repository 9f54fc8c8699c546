"""What the hosts of the behaviour suite can do: as lines for a shell, and as programs of a host in memory."""

import threading

BIG = 5_000_000

SHELL = {
    "cat": "cat",
    "print": "printf %s {0}",
    "fail": "exit {0}",
    "complain": "printf oops >&2; exit 3",
    "crash": "kill -9 $$",
    "many": "head -c {0} /dev/zero",
    "shout": "head -c {0} /dev/zero >&2; printf done",
    "first": "head -c 1",
    "deaf": "sleep 20",
    "where": "pwd",
}


def cat(streams):
    while part := streams.read(4096):
        streams.write(part)
    return 0


def say(streams):
    streams.write(streams.arguments[0].encode())
    return 0


def fail(streams):
    return int(streams.arguments[0])


def complain(streams):
    streams.write_error(b"oops")
    return 3


def crash(streams):
    return 137


def many(streams):
    streams.write(bytes(int(streams.arguments[0])))
    return 0


def shout(streams):
    streams.write_error(bytes(int(streams.arguments[0])))
    streams.write(b"done")
    return 0


def first(streams):
    streams.write(streams.read(1))
    return 0


def deaf(streams):
    threading.Event().wait(20)
    return 0


PROGRAMS = {
    "cat": cat,
    "print": say,
    "fail": fail,
    "complain": complain,
    "crash": crash,
    "many": many,
    "shout": shout,
    "first": first,
    "deaf": deaf,
}
