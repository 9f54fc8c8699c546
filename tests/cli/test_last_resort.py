"""How a command ends whose output nobody takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch import contract


def ended(words, stdout, tmp_path):
    command = [sys.executable, "-m", "ttlaunch", *words]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, cwd=tmp_path, env=environment, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [["explain", "R004"], ["explain", "R004", "--format", "json"], ["run", "--help"]])
def test_a_command_whose_reader_has_ended_says_so_by_its_status_and_nothing_else(tmp_path, words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert (contract.STATUS_CLOSED_PIPE, "") == ended(words, writer, tmp_path)
    finally:
        os.close(writer)


@pytest.mark.parametrize("words", [["explain", "R004"], ["explain", "R004", "--format", "json"], ["--help"]])
def test_a_full_device_behind_standard_output_is_named(tmp_path, words):
    with Path("/dev/full").open("w") as full:
        status, said = ended(words, full, tmp_path)
    message = "error[P032]: standard output cannot be written: no space left on device\n\n"
    message += "hint: make room on this disk, or name a place on another one\n\n"
    assert (contract.STATUS_USAGE, message) == (status, said)


def test_a_current_folder_that_was_removed_is_what_is_wrong(tmp_path):
    (tmp_path / "gone").mkdir()
    line = f"cd gone && rmdir ../gone && exec {sys.executable} -m ttlaunch plan data_parallel"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (contract.STATUS_USAGE, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("error[P009]: the current folder is not there any more\n")
