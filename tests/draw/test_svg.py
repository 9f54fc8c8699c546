"""The SVG by its geometry: no line through a box, no two lines on top of each other, no text over another."""

# ruff: noqa: S314 - the XML is our own

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.draw.grid import place_boxes
from ttlaunch.draw.scene import Box, Occupant, Scene, Wire
from ttlaunch.draw.svg import render_svg

SVG = "{http://www.w3.org/2000/svg}"


def scene(count, links, *, channels=lambda number: 2, shape=(1, 8), host="box-00"):
    boxes = tuple(
        Box(f"mesh {n}", f"{shape[0]} × {shape[1]}", shape, occupants=(Occupant(n, host, "worker"),))
        for n in range(count)
    )
    wires = tuple(Wire(a, b, channels(number)) for number, (a, b) in enumerate(links))
    return Scene("lab", "a cluster", boxes, wires, ("worker",))


@st.composite
def scenes(draw):
    """Up to 12 boxes, any links between them, with one number of channels or several."""
    count = draw(st.integers(1, 12))
    pairs = list(combinations(range(count), 2))
    links = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []
    various = draw(st.booleans())
    return scene(count, links, channels=lambda number: 1 + number % 3 if various else 2)


def corners(path):
    """Corners of a line, its rounded ones put back."""
    words = re.findall(r"([MLQ])([-\d. ]+)", path.get("d"))
    points = [tuple(map(float, numbers.split()[:2])) for _, numbers in words]
    # A rounded corner is `L enter Q corner leave`; its entry lies on the way.
    return [point for number, point in enumerate(points) if number + 1 == len(words) or words[number + 1][0] != "Q"]


def sides(root):
    return [list(pairwise(corners(path))) for path in root.iter(f"{SVG}path") if path.get("class") == "link"]


def rectangles(root, kind):
    found = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == kind and rect.get("x")]
    values = [[float(rect.get(name)) for name in ("x", "y", "width", "height")] for rect in found]
    return [(x, y, x + width, y + height) for x, y, width, height in values]


def overlap(a, b, *, slack=0.3):
    return a[0] + slack < b[2] and b[0] + slack < a[2] and a[1] + slack < b[3] and b[1] + slack < a[3]


def area(side, *, width=0.5):
    (x1, y1), (x2, y2) = side
    return min(x1, x2) - width, min(y1, y2) - width, max(x1, x2) + width, max(y1, y2) + width


def is_flat(side):
    return abs(side[0][1] - side[1][1]) < 0.2


@given(scenes())
@settings(deadline=None, max_examples=examples(60))
def test_nothing_lies_on_top_of_anything_else(drawn):
    root = ET.fromstring(render_svg(drawn))
    boxes, lines, labels = rectangles(root, "box"), sides(root), rectangles(root, "page")
    assert len(drawn.boxes) == len(boxes)
    assert len(drawn.wires) == len(lines)
    assert not [pair for pair in combinations(boxes, 2) if overlap(*pair)]
    for line in lines:
        for side in line:
            assert abs(side[0][0] - side[1][0]) < 0.2 or is_flat(side), "lines run along the axes"
            assert not [box for box in boxes if overlap(area(side), box, slack=1)]
    for one, other in combinations(lines, 2):
        along = [(a, b) for a in one for b in other if is_flat(a) == is_flat(b) and overlap(area(a), area(b))]
        assert not along
    assert not [(label, box) for label in labels for box in boxes if overlap(label, box)]


@given(scenes())
@settings(deadline=None, max_examples=examples(30))
def test_everything_lies_on_the_page(drawn):
    root = ET.fromstring(render_svg(drawn))
    width, height = float(root.get("width")), float(root.get("height"))
    points = [point for line in sides(root) for side in line for point in side]
    points += [corner for x1, y1, x2, y2 in rectangles(root, "box") for corner in ((x1, y1), (x2, y2))]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)


def test_a_torus_keeps_its_rows_and_columns():
    links = [(4 * r + c, 4 * r + (c + 1) % 4) for r in range(4) for c in range(4)]
    links += [(4 * r + c, (4 * r + c + 4) % 16) for r in range(4) for c in range(4)]
    cells = place_boxes(scene(16, links), columns=4)
    assert [divmod(number, 4) for number in range(16)] == cells


def test_a_chain_winds_through_the_rows():
    drawn = scene(9, [(n, n + 1) for n in range(8)])
    cells = place_boxes(drawn, columns=3)
    steps = [abs(cells[n][0] - cells[n + 1][0]) + abs(cells[n][1] - cells[n + 1][1]) for n in range(8)]
    assert [1] * 8 == steps


def test_the_picture_stands_alone_and_can_be_read_aloud():
    text = render_svg(scene(2, [(0, 1)]))
    root = ET.fromstring(text)
    assert "img" == root.get("role")
    assert ["lab", "a cluster"] == [root.find(f"{SVG}title").text, root.find(f"{SVG}desc").text.split(": ")[1]]
    titles = [group.find(f"{SVG}title").text for group in root.iter(f"{SVG}g")]
    assert ["mesh 0 – mesh 1: 2 channels", "mesh 0, 1 × 8: rank 0 worker on box-00"] == titles[:2]
    assert [] == re.findall(r"url\(|href|@import|<script|<image", text)
    assert 1 == text.count("http")
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("host", ["<b>&\"'", "bell\x07", "x" * 70])
def test_any_name_can_be_drawn(host):
    drawn = scene(3, [(0, 1)], host=host)
    root = ET.fromstring(render_svg(drawn))
    boxes = rectangles(root, "box")
    assert host.replace("\x07", "�") in "".join(root.itertext())
    assert all(box[2] - box[0] > len(host) * 6.6 for box in boxes)


def test_devices_of_two_hosts_are_told_apart():
    box = Box("mesh 0", "2 × 8", (2, 8), (1, 2), (Occupant(0, "a"), Occupant(1, "b")))
    text = render_svg(Scene("lab", "", (box,), ()))
    assert ('class="device-0"' in text, 'class="device-1"' in text) == (True, True)
    assert (">a</text>" in text, ">b</text>" in text) == (True, True)
