"""What a picture shows: boxes for meshes and switches, one wire for two boxes, a host where there are no meshes."""

from dataclasses import replace

import pytest

from ttlaunch.draw.scene import Wire, make_scene
from ttlaunch.spec.topology.load import load_topology
from ttlaunch.spec.topology.model import Switch, SwitchLink


@pytest.fixture
def topology(tmp_path, write_cluster):
    folder = write_cluster(tmp_path / "lab", [(0, 1), (1, 2, 4)])
    return load_topology(folder, name="lab", environment={}, working_folder=tmp_path).topology


def test_a_mesh_is_a_box_with_its_rank(topology):
    scene = make_scene(topology, None)
    assert "3 hosts · 3 meshes · 2 links" == scene.subtitle
    assert ("mesh 1", "1 × 8", ("box-01",)) == (scene.boxes[1].name, scene.boxes[1].detail, scene.boxes[1].hosts)
    assert (Wire(0, 1, 2), Wire(1, 2, 4)) == scene.wires
    assert None is scene.channels


def test_a_switch_is_a_box_and_its_links_are_wires(topology):
    place = topology.meshes[0].span
    switch = Switch(0, "S0", (4, 8), place)
    links = tuple(SwitchLink(0, 2, other_is_switch=False, channels=n, span=place, devices=(n, n)) for n in (1, 3))
    scene = make_scene(replace(topology, switches=(switch,), switch_links=links), None)
    assert "3 hosts · 3 meshes · 1 switch · 4 links" == scene.subtitle
    assert ("switch 0", "4 × 8", ()) == (scene.boxes[3].name, scene.boxes[3].detail, scene.boxes[3].occupants)
    assert Wire(2, 3, 4) == scene.wires[2]


def test_without_meshes_a_host_is_a_box(topology):
    scene = make_scene(replace(topology, meshes=(), links=(), bindings=()), None)
    assert ["box-00", "box-01", "box-02"] == [box.name for box in scene.boxes]
    assert ("1 slot", None) == (scene.boxes[0].detail, scene.boxes[0].shape)
