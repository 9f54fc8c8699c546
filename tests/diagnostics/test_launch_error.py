"""A file that cannot be read or written is named with the system's reason, and with what to do about it."""

import errno
import os

import pytest

from ttlaunch.diagnostics import file_error


@pytest.mark.parametrize(
    ("number", "verb", "repair"),
    [
        (errno.ENOENT, "read", "check its spelling, and the folder that it is in"),
        (errno.ENOENT, "written", "make its folder first"),
        (errno.EISDIR, "read", "this is a folder; name a file"),
        (errno.EACCES, "read", "name one that you may read, or ask its owner"),
        (errno.EROFS, "used for results", "name a place where you may write"),
        (errno.ENOSPC, "written", "make room on this disk, or name a place on another one"),
    ],
)
def test_a_file_that_cannot_be_used_has_a_repair(number, verb, repair):
    error = file_error("said.json", OSError(number, os.strerror(number)), verb=verb)

    assert 2 == error.exit_status
    assert f"said.json cannot be {verb}: {os.strerror(number).lower()}" == error.diagnostics[0].message
    assert (repair,) == error.diagnostics[0].hints


def test_a_reason_without_a_known_repair_is_told_alone():
    assert () == file_error("said.json", OSError(errno.EIO, "Input/output error")).diagnostics[0].hints
