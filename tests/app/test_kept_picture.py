"""A run on more than one host or mesh keeps the picture of its cluster, so that a view needs nothing but its folder."""

from types import SimpleNamespace

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.execute import _keep_picture
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.dashboard.picture import picture_as_json
from ttlaunch.running.runs.facts import CLUSTER_FILE
from ttlaunch.running.runs.run_folder import RunFolder


@pytest.fixture
def keep(tmp_path):
    def kept(on, recipe):
        found = resolve(RunSpec(recipe, on=on), dialogue=Unattended())
        _keep_picture(SimpleNamespace(topology=found.topology, description=found), RunFolder("run", tmp_path))
        return picture_as_json(tmp_path)

    return kept


def test_the_meshes_their_ranks_and_links_are_those_of_the_plan(keep):
    tree = str(keep("5loudboxes", "fabric_minimal"))
    assert "rank 4" in tree
    assert "'class': 'link'" in tree


def test_a_single_host_needs_no_picture(keep, tmp_path):
    assert keep("local", "data_parallel") is None
    assert not (tmp_path / CLUSTER_FILE).exists()
