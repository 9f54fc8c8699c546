"""Files of a rank's in shared memory outside the run's folder are removed with the folder, and nobody else's are."""

import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.running.conftest import wait_until
from ttlaunch.agent.claims import remove_scratch
from ttlaunch.agent.segments import note_segments

SHARED = Path("/dev/shm")  # noqa: S108 - the one place where MPICH puts such files
MAPS = """
import mmap, sys, time
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
time.sleep(60)
"""


def test_what_the_rank_maps_goes_with_the_runs_folder_and_what_it_does_not_map_stays(tmp_path):
    prefix = f"seg_{uuid.uuid4().hex}"
    mapped, other = SHARED / f"{prefix}_mapped", SHARED / f"{prefix}_other"
    other.touch()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    rank = subprocess.Popen([sys.executable, "-c", MAPS, str(mapped)])
    try:
        note_segments(rank.pid, [f"{prefix}_*"], scratch=str(scratch))
        wait_until((scratch / "segments" / mapped.name).exists, within_s=20, what="the file is noted")
        time.sleep(0.3)
        assert [mapped.name] == [path.name for path in (scratch / "segments").iterdir()]
        remove_scratch(str(scratch))
        assert (False, True, False) == (mapped.exists(), other.exists(), scratch.exists())
    finally:
        rank.kill()
        rank.wait()
        mapped.unlink(missing_ok=True)
        other.unlink()


def test_a_folder_without_notes_is_removed_alone(tmp_path):
    (tmp_path / "scratch").mkdir()
    remove_scratch(str(tmp_path / "scratch"))
    assert [] == list(tmp_path.iterdir())
