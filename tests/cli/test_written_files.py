"""A file that a command writes is there whole, or what was there before."""

import subprocess
import sys

import pytest

from ttlaunch.cli.console import write_file
from ttlaunch.diagnostics import LaunchError

CODE = """
import resource, signal, sys
from pathlib import Path
from ttlaunch.cli.console import write_file
from ttlaunch.diagnostics import LaunchError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_file(Path("a"), bytes(2000), force=sys.argv[1] == "force")
except LaunchError as error:
    print(error.diagnostics[0].message)
"""


@pytest.mark.parametrize("how", ["new", "force"])
def test_a_file_that_cannot_be_written_to_its_end_leaves_what_was_there(here, how):
    if how == "force":
        (here / "a").write_text("before")
    done = subprocess.run([sys.executable, "-c", CODE, how], cwd=here, capture_output=True, text=True, check=True)
    assert "a cannot be written: file too large\n" == done.stdout
    assert (["a"] if how == "force" else []) == [path.name for path in here.iterdir()]
    assert how == "new" or (here / "a").read_text() == "before"


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_where_a_file_is_wanted_is_never_said_to_be_overwritten_by_force(here, force):
    with pytest.raises(LaunchError) as refusal:
        write_file(here, b"", force=force)

    (mistake,) = refusal.value.diagnostics
    assert "a folder" in f"{mistake.message} {mistake.hints}"
    assert not any("--force" in hint for hint in mistake.hints)
