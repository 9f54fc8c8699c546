"""The cluster on the page is what `ttlaunch show` draws; a file of a stranger draws that, or nothing."""

import json
from dataclasses import asdict
from xml.etree import ElementTree as ET

import pytest

from tests.dashboard.made_run import HOSTILE
from ttlaunch.dashboard.picture import picture_as_json
from ttlaunch.draw.scene import Box, Occupant, Scene, Wire
from ttlaunch.draw.svg import render_svg
from ttlaunch.running.runs.facts import CLUSTER_FILE

SCENE = Scene(
    title="2loudboxes",
    subtitle="2 hosts · 2 meshes",
    boxes=(
        Box("mesh 0", "2 × 4", (2, 4), (1, 2), (Occupant(0, "a", "worker"), Occupant(1, "b", "worker"))),
        Box("mesh 1", "2 × 4", (2, 4), (1, 1), (Occupant(2, "b", "server"),), hidden=3),
    ),
    wires=(Wire(0, 1, 2),),
    roles=("worker", "server"),
)


def texts(tree):
    return [
        one if isinstance(one, str) else text
        for one in tree[2:]
        for text in ([one] if isinstance(one, str) else texts(one))
    ]


def kept(path, content):
    (path / CLUSTER_FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return picture_as_json(path)


def test_the_page_gets_every_shape_and_text_that_show_draws(tmp_path):
    tree = kept(tmp_path, asdict(SCENE))
    svg = ET.fromstring(render_svg(SCENE))  # noqa: S314 - our own
    of_show = [
        text.strip()
        for one in svg.iter()
        if not one.tag.endswith(("style", "desc")) and (text := one.text or "").strip()
    ]
    assert of_show == texts(tree)
    assert "rank 2 server" in of_show


def shapes(tree):
    return [tree[0], *(name for one in tree[2:] if isinstance(one, list) for name in shapes(one))]


def test_names_of_a_stranger_are_texts_and_no_elements(tmp_path):
    boxes = [{**asdict(SCENE)["boxes"][0], "name": HOSTILE, "detail": "</text><script>x</script>"}]
    tree = kept(tmp_path, {**asdict(SCENE), "title": HOSTILE, "boxes": boxes, "wires": []})
    assert HOSTILE in texts(tree)
    assert {"svg", "title", "g", "rect", "text", "path"} >= set(shapes(tree))


@pytest.mark.parametrize(
    "change",
    [
        {"wires": [{"a": 0, "b": 2, "channels": 1}]},
        {"wires": [{"a": 1, "b": 1, "channels": 1}]},
        {"boxes": []},
        {"boxes": [asdict(SCENE)["boxes"][0]] * 65},
        {"boxes": [{**asdict(SCENE)["boxes"][0], "shape": [0, 4]}], "wires": []},
        {"boxes": [{**asdict(SCENE)["boxes"][0], "shape": "wide"}], "wires": []},
        {"title": 7},
    ],
)
def test_what_cannot_be_drawn_is_no_picture(tmp_path, change):
    assert kept(tmp_path, {**asdict(SCENE), **change}) is None
    assert kept(tmp_path, "{") is None
    (tmp_path / CLUSTER_FILE).unlink()
    assert picture_as_json(tmp_path) is None


def test_a_mesh_with_more_devices_than_a_picture_can_have_is_drawn_without_them(tmp_path):
    box = {**asdict(SCENE)["boxes"][0], "shape": [2**40, 2**12]}
    assert len(json.dumps(kept(tmp_path, {**asdict(SCENE), "boxes": [box], "wires": []}))) < 10_000
