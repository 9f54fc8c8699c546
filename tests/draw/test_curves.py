"""Curves: the axis that does not exaggerate, the picture in the terminal, and the SVG."""

# ruff: noqa: S314 - the XML is our own

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.draw.curves import Chart, Curve, render_chart_text, render_charts_svg, value_axis

SVG = "{http://www.w3.org/2000/svg}"
LOSSES = st.floats(-1e100, 1e100, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-100)
POINTS = st.lists(st.tuples(st.floats(0, 1e9), LOSSES), max_size=20).map(sorted).map(tuple)


@given(st.lists(LOSSES, min_size=1))
def test_the_axis_covers_every_value_and_never_less_than_a_tenth_of_the_largest(values):
    axis = value_axis(values)
    slack = 1e-6 * (axis.most - axis.least)
    assert axis.least - slack <= min(values) <= max(values) <= axis.most + slack
    assert axis.most - axis.least >= 0.0999 * max(map(abs, values))
    assert 2 <= len(axis.ticks) <= 8


def test_a_small_difference_looks_small_also_if_nothing_else_is_drawn():
    axis = value_axis([3.086, 3.094])
    assert (2.9, 3.3) == (pytest.approx(axis.least), pytest.approx(axis.most))
    assert axis.share(3.094) - axis.share(3.086) == pytest.approx(0.02)
    assert (3.0, 6.0) == (value_axis([5.6, 3.086, 3.094]).least, value_axis([5.6, 3.086, 3.094]).most)


def test_a_chart_in_the_terminal_has_a_line_that_falls_and_dots():
    line = Curve("training", ((0, 4.0), (10, 0.0)))
    dots = Curve("validation", ((0, 0.0), (10, 4.0)), is_dots=True)
    assert [
        "4 ┤⠑⢄        o",
        "3 ┤  ⠑⠢⡀",
        "2 ┤    ⠈⠢⡀",
        "1 ┤      ⠈⠢⢄",
        "0 ┤o        ⠑⢄",
        "  └───────────",
        "   0 steps  10",
    ] == render_chart_text(Chart("steps", (line, dots)), width=14, height=5)
    assert [
        "4 |**        o",
        "3 |  ***",
        "2 |    ***",
        "1 |      ***",
        "0 |o        **",
        "  +-----------",
        "   0 steps  10",
    ] == render_chart_text(Chart("steps", (line, dots)), width=14, height=5, plain=True)


@given(POINTS, POINTS, st.integers(20, 120), st.integers(3, 20))
def test_a_chart_in_the_terminal_is_never_wider_or_higher_than_asked(training, validation, width, height):
    curves = (Curve("training", training), Curve("validation", validation, is_dots=True))
    lines = render_chart_text(Chart("steps", curves), width=width, height=height)
    assert height + 2 == len(lines)
    if all(1e-3 < abs(loss) < 1e6 for _, loss in (*training, *validation)):
        assert max(map(len, lines)) <= max(width, 26)


@given(POINTS, POINTS)
def test_every_point_of_the_svg_lies_inside_it(training, validation):
    chart = Chart("steps", (Curve("a <b>", training), Curve("c", validation, is_dots=True)))
    root = ET.fromstring(render_charts_svg("A & B", [chart, chart], note="2 cores"))
    width, height = float(root.get("width")), float(root.get("height"))
    for dot in root.iter(f"{SVG}circle"):
        assert 0 <= float(dot.get("cx")) <= width
        assert 0 <= float(dot.get("cy")) <= height
    assert "a <b>" in [text.text for text in root.iter(f"{SVG}text")]


def test_more_curves_than_colours_are_told_apart_by_dashes():
    curves = tuple(Curve(str(number), ((0, 1.0), (1, number))) for number in range(12))
    root = ET.fromstring(render_charts_svg("", [Chart("steps", curves)], note=""))
    looks = {(one.get("stroke"), one.get("stroke-dasharray")) for one in root.iter(f"{SVG}path") if one.get("stroke")}
    assert 12 == len(looks)
