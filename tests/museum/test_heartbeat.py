"""The bug museum's last room: a rank whose heartbeat goes on while its step hangs (bug 30, C11)."""

import re
import shutil
from pathlib import Path

import pytest

from tests.running.conftest import StartedRun

pytestmark = pytest.mark.mpi

RECIPE = """\
from ttlaunch.recipe import ConfigFile, Layout, Recipe, all_pairs

RECIPE = Recipe("Two that talk.", ConfigFile, [Layout("all", peer=None)], [all_pairs("peer")], uses_data=False)
"""
EXHIBIT = Path(__file__).parent / "exhibits" / "bug_30_heartbeat_beside_a_hang.py"


def test_a_rank_that_says_it_is_alive_and_does_nothing_is_caught(here):
    """A rank must make progress, not only send heartbeats: the run ends, and names the rank that the other one waits for."""
    (here / "mine").mkdir()
    (here / "mine/recipe.py").write_text(RECIPE)
    shutil.copy(EXHIBIT, here / "mine/trainer.py")
    run = StartedRun(here, ("mine", "-n", "2", "--hang-timeout", "2"))
    try:
        run.wait_for_file("hangs")
        assert 6 == run.ends(within_s=30)
        assert "alive" in run.stdout + run.stderr
        assert re.search(r"rank 1 .*has not moved for \d+ s: 1 rank waits for it, and it waits for none", run.stderr)
    finally:
        run.close()
