"""What a rank tells the launcher, on a disk that is full for a while."""

import os

import pytest

from ttlaunch import contract
from ttlaunch.runtime.telemetry import records
from ttlaunch.runtime.telemetry.records import ProgressWriter


@pytest.fixture
def disk(monkeypatch):
    """`disk(*room)`: from now on writes find room for so many bytes, one after the other; then there is enough."""

    def fill(*room, errno=28):
        real, left = os.write, list(room)

        def write(descriptor, data):
            space = left.pop(0) if left else len(data)
            if not space:
                raise OSError(errno, os.strerror(errno))
            return real(descriptor, data[:space])

        monkeypatch.setattr(os, "write", write)

    return fill


def steps(folder):
    lines = (folder / contract.progress_file(0)).read_text().splitlines()
    return [contract.read_record(line)["step"] for line in lines]


def test_a_record_waits_for_a_disk_that_a_checkpoint_has_filled(tmp_path, disk):
    """It ends as a whole line even if the room was enough for its beginning."""
    writer = ProgressWriter(tmp_path, 0)
    disk(10, 0, 0)
    for step in (1, 2):
        writer.write(contract.KIND_STEP, step=step)
    writer.close()
    assert [1, 2] == steps(tmp_path)


def test_a_disk_that_stays_full_is_an_error(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(records, "_PATIENCE_S", 0.1)
    writer = ProgressWriter(tmp_path, 0)
    disk(*[0] * 1000)
    with pytest.raises(OSError, match="No space left"):
        writer.write(contract.KIND_STEP, step=1)


def test_nothing_else_is_waited_for(tmp_path, disk):
    writer = ProgressWriter(tmp_path, 0)
    disk(0, errno=5)
    with pytest.raises(OSError, match="Input/output error"):
        writer.write(contract.KIND_STEP, step=1)
