"""`ttlaunch show`: the picture in the terminal, its short and its JSON form, the SVG file, and a table for many meshes."""

import json

import pytest

STAR = [(0, 1), (0, 2, 4), (0, 3)]
THREE_TIERS = "--recipe hierarchical_parallel --set multihost_config.num_workers=3"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("5loudboxes", f"show 5loudboxes {THREE_TIERS}"),
        ("2loudboxes", "show 2loudboxes"),
        ("local", "show local --recipe hierarchical_parallel"),
    ],
)
def test_a_cluster_in_the_terminal(ttlaunch, golden, name, line):
    answer = ttlaunch(line)
    golden(f"show/{name}.txt", answer.stdout)
    assert ("", 0) == (answer.stderr, answer.status)


def links_of(size):
    return [(n, n + 1) for n in range(size - 1)]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("size", [1, 2, 5, 9, 16, 17, 64])
def test_no_line_is_wider_than_the_terminal(ttlaunch, here, write_cluster, monkeypatch, size, width):
    write_cluster(here / "lab", links_of(size), meshes=list(range(size)))
    monkeypatch.setenv("COLUMNS", str(width))
    text = ttlaunch("show lab --recipe fabric_minimal").stdout
    assert max(map(len, text.splitlines())) <= width
    assert all(f"rank {rank} peer" in text for rank in range(size))
    assert all(f"mesh {mesh}" in text for mesh in range(size))


def test_links_that_go_around_boxes_are_listed(ttlaunch, here, write_cluster):
    write_cluster(here / "lab", [(0, 1), (1, 2), (2, 0, 4)])
    assert "further links  mesh 0 ─ 4 ─ mesh 2\n" in ttlaunch("show lab").stdout


def test_many_meshes_are_a_table(ttlaunch, here, write_cluster):
    write_cluster(here / "lab", [*links_of(20), (0, 19, 5)])
    lines = ttlaunch("show lab").stdout.splitlines()
    assert "mesh 0   1 × 8  box-00  rank 0   ─ 1×2, 19×5" == lines[2]
    assert "after ─: the meshes it is linked to, each × its channels" == lines[-1]


def test_the_short_form_is_a_line_for_each_mesh(ttlaunch, here, write_cluster):
    write_cluster(here / "star", STAR)
    lines = ttlaunch("show star --format concise").stdout.splitlines()
    assert "mesh 0\t1 × 8\tbox-00\trank 0\tmesh 1,mesh 2,mesh 3" == lines[0]


def test_programs_read_the_cluster_as_json(ttlaunch, here, write_cluster):
    write_cluster(here / "star", STAR)
    found = json.loads(ttlaunch(f"show star {THREE_TIERS} --format json").stdout)
    assert {"a": "mesh 0", "b": "mesh 2", "channels": 4} == found["links"][1]
    assert [{"rank": 3, "host": "box-03", "role": "aggregator_optimizer"}] == found["boxes"][3]["ranks"]
    assert [1, 8] == found["boxes"][0]["shape"]


def test_the_picture_is_written_as_svg(ttlaunch, here):
    answer = ttlaunch(f"show 5loudboxes {THREE_TIERS} --out cluster.svg")
    assert ("wrote cluster.svg\n", "", 0) == (answer.stdout, answer.stderr, answer.status)
    assert (here / "cluster.svg").read_text().startswith("<svg ")


def test_a_picture_that_cannot_be_written_is_an_error(ttlaunch):
    answer = ttlaunch("show 5loudboxes --out nowhere/cluster.svg")
    assert (
        "error[P032]: nowhere/cluster.svg cannot be written: no such file or directory\n\nhint: make its folder first\n\n",
        2,
    ) == (
        answer.stderr,
        answer.status,
    )


def test_a_cluster_with_mistakes_is_not_drawn(refused, here, write_cluster):
    write_cluster(here / "lab", [(0, 1)])
    refused("show lab", files={"lab/hosts.txt": "box-00 slot=1\n"}, status=3)
