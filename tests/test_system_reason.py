"""`system_reason`: the system's words for an error, as every message of ttlaunch has them."""

import errno
import os

import pytest

from ttlaunch.errors import RunFolderError
from ttlaunch.system_reason import system_reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.json"), "no space left on device"),
        (TimeoutError("Timed out"), "timed out"),  # without a number the system has no other words
        (OSError(), ""),
        (ValueError("Embedded null byte"), "Embedded null byte"),
        (RunFolderError("/srv/Runs: it is full"), "/srv/Runs: it is full"),
    ],
)
def test_only_the_words_of_the_system_are_written_in_lower_case(error, reason):
    assert reason == system_reason(error)
