"""Only a run's user, and a group with which the user shares it, may read its folder; files of the program follow its umask."""

import grp
import os
import stat
import subprocess
import sys

import pytest

from tests.forked import FORKED_LINE
from ttlaunch import contract

pytestmark = pytest.mark.mpi

PROGRAM = "open('made', 'w').close()\nprint('hello')\n"
RECIPE = f"""
    data_parallel -n 2 {FORKED_LINE} --trace --profile-steps 2 --sink tensorboard
    --set training_config.steps=3 --set checkpoint_config.interval=2 --set training_config.validation_interval=2
    --set transformer_config.num_blocks=1 --set transformer_config.embedding_dim=16
""".split()


@pytest.fixture
def run(here):
    """`run(*words, umask=…)`: the folder of a run that has ended well, started by a user with this umask."""

    def start(*words, umask):
        answer = subprocess.run(
            [sys.executable, "-m", "ttlaunch", "run", *words],
            env=os.environ | {"XDG_STATE_HOME": str(here / "state")},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            umask=umask,
        )
        assert 0 == answer.returncode, answer.stderr
        (folder,) = (path for path in (here / "runs").glob("[!.]*") if path.is_dir())
        return folder

    return start


def modes(folder):
    """The rights of everything in a folder and of the folder itself, by name; the execute bit of scripts aside."""
    found = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    folders = {str(path): stat.S_IMODE(one.st_mode) for path, one in found.items() if stat.S_ISDIR(one.st_mode)}
    files = {str(path): stat.S_IMODE(one.st_mode) & ~0o100 for path, one in found.items() if stat.S_ISREG(one.st_mode)}
    assert len(found) == len(folders) + len(files)
    return folders, files


@pytest.mark.parametrize("words", [["work.py"], RECIPE], ids=["program", "recipe"])
def test_only_its_user_can_read_a_run(run, here, words):
    (here / "work.py").write_text(PROGRAM)
    folder = run(*words, umask=0o022)
    folders, files = modes(folder)
    assert dict.fromkeys(folders, 0o700) == folders
    assert dict.fromkeys(files, 0o600) == files
    assert 0o755 == stat.S_IMODE((here / "runs").stat().st_mode)
    if words == ["work.py"]:
        assert 0o644 == stat.S_IMODE((here / "made").stat().st_mode)
    else:
        assert {contract.TRACE_FILE, contract.REPORT_FILE, contract.CHECKPOINT_MANIFEST} <= {
            path.name for path in folder.rglob("*")
        }


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_group_can_read_a_run_that_is_shared_with_it(run, umask):
    group = next(one for one in grp.getgrall() if one.gr_gid not in {os.getgid(), 0} and (os.geteuid() == 0))
    folder = run("--share-with", group.gr_name, *RECIPE, umask=umask)
    folders, files = modes(folder)
    assert dict.fromkeys(folders, 0o2750) == folders
    assert dict.fromkeys(files, 0o640) == files
    assert {group.gr_gid} == {path.stat().st_gid for path in [folder, *folder.rglob("*")]}


def test_a_group_that_is_not_there_is_refused(ttlaunch, here):
    answer = ttlaunch("run fabric_minimal --share-with nobodys-group")
    assert (2, "error[P009]: there is no group `nobodys-group` on this machine to share the run with\n") == (
        answer.status,
        answer.stderr.rstrip("\n") + "\n",
    )
    assert not (here / "runs").exists()
