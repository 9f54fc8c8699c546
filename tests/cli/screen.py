"""A command under a pseudo-terminal, and the screen that a user sees: made from the bytes that the command sends."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[=>78]")


class Screen:
    """Keeps lines as xterm does; each character takes one cell, and a resize cuts nothing and joins nothing."""

    def __init__(self, *, width):
        self.width = width
        self._lines = [[]]
        self._row = self._column = 0

    def feed(self, data):
        text, at = data.decode("utf-8", "replace"), 0
        while at < len(text):
            found = _SEQUENCE.match(text, at)
            if found:
                self._control(found[1] or "", found[2] or "")
                at = found.end()
            else:
                self._put(text[at])
                at += 1
        return self

    @property
    def lines(self):
        return ["".join(line).rstrip() for line in self._lines]

    def _put(self, character):
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character >= " ":
            if self._column == self.width:
                self._column = 0
                self._down()
            line = self._lines[self._row]
            line.extend(" " * (self._column + 1 - len(line)))
            line[self._column] = character
            self._column += 1

    def _down(self):
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append([])

    def _control(self, values, letter):
        first = int(values) if values.isdigit() else 0
        if letter == "A":
            self._row = max(0, self._row - (first or 1))
        elif letter == "K":
            begin, end = (0, None) if first == 2 else (self._column, None) if first == 0 else (0, self._column)
            line = self._lines[self._row]
            line[begin:end] = " " * len(line[begin:end])
        elif letter not in "mhl":
            raise AssertionError(f"the screen does not know CSI {values} {letter}")


class Terminal:
    """A command under a pseudo-terminal."""

    def __init__(self, folder, *arguments, width=120, command=(sys.executable, "-m", "ttlaunch"), **environment):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        known = {
            name: value for name, value in os.environ.items() if name not in {"CI", "NO_COLOR", "COLUMNS", "LINES"}
        }
        self.width = width
        self.shown = b""
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=own_the_terminal,  # noqa: PLW1509 - no thread has been started in this test
            env={**known, "TERM": "xterm-256color", **environment},
        )
        os.close(slave)

    def read_until(self, done, *, within_s):
        deadline = time.monotonic() + within_s
        while not done():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {within_s} s; the terminal shows:\n{self.text}")
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._master, 65536)
                except OSError:  # the other side is closed
                    return

    def type(self, data):
        os.write(self._master, data)

    def ends(self, *, within_s):
        self.read_until(lambda: False if self.process.poll() is None else not self._more(), within_s=within_s)
        return self.process.wait(5)

    def _more(self):
        return bool(select.select([self._master], [], [], 0)[0])

    @property
    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown.decode("utf-8", "replace")).replace("\r", "")

    @property
    def screen(self):
        """The lines on the screen, and those that have scrolled away."""
        return Screen(width=self.width).feed(self.shown).lines

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)
        os.close(self._master)


def own_the_terminal():
    """Make the terminal the controlling one, so that Ctrl-C becomes a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
