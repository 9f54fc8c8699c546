"""What lies below the remote folder is for its owner, also where the folder itself was made by hand and is open to all."""

import stat

import pytest

from tests.agent.test_agent import Hosted
from ttlaunch.agent.receive import _Session

PARTS = ("data", "releases", "spare")


def modes(folder, names=PARTS):
    return {name: stat.S_IMODE((folder / name).stat().st_mode) for name in names}


def make_folders(folder):
    arguments = {"remote_folder": str(folder), "owner": "0" * 16, "tree": "0" * 64}
    _Session(arguments, type("Silent", (), {"alive": None})())._make_folders()


def test_code_and_data_in_an_open_remote_folder_are_closed_to_others(tmp_path):
    folder = tmp_path / "remote"
    folder.mkdir()
    folder.chmod(0o755)
    make_folders(folder)
    assert modes(folder) == dict.fromkeys(PARTS, 0o700)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755, "the user's own folder stays as it is"


def test_what_an_earlier_version_left_open_is_closed(tmp_path):
    folder = tmp_path / "remote"
    for name in PARTS:
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o755)
    make_folders(folder)
    assert modes(folder) == dict.fromkeys(PARTS, 0o700)


@pytest.mark.parametrize("mode", [0o770, 0o2775])
def test_a_group_that_may_write_to_the_remote_folder_keeps_its_access(tmp_path, mode):
    folder = tmp_path / "remote"
    for name in PARTS:
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o2775)
    folder.chmod(mode)
    make_folders(folder)
    assert modes(folder) == dict.fromkeys(PARTS, 0o2770)


def test_the_folder_of_runs_is_closed_by_the_agent(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o755)
    run = Hosted(tmp_path)
    try:
        assert modes(tmp_path, ("runs",)) == {"runs": 0o700}
    finally:
        run.close()
