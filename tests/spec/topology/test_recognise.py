"""A file that is named alone is recognised by what stands in it; its name only decides where that does not."""

import time
from pathlib import Path

import pytest

from ttlaunch.diagnostics import Source
from ttlaunch.spec.topology.recognise import Kind, Recognised, kind_of_content, recognise

ROOT = Path(__file__).parents[3]


def check(text, expected, *, others=(), name="file"):
    kind = None if expected is None else Kind(expected)
    assert Recognised(kind, tuple(Kind(other) for other in others)) == recognise(Source(name, text))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *((path, "hosts") for path in sorted(ROOT.glob("configurations/*/hosts.txt"))),
        *((path, "mgd") for path in sorted(ROOT.glob("configurations/*/mgd.yaml"))),
        *((path, "bindings") for path in sorted(ROOT.glob("configurations/*/rank_bindings.yaml"))),
        *((path, "train") for path in sorted(ROOT.glob("recipes/*/train.yaml"))),
    ],
    ids=lambda value: str(value.relative_to(ROOT)) if isinstance(value, Path) else value,
)
def test_every_file_that_comes_with_the_package_is_recognised_whatever_its_name(path, kind):
    check(path.read_text(), kind)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a\nb\n", "hosts"),
        ("user@a slots = 4 # big\n", "hosts"),
        ("10.0.0.1\n", "hosts"),
        ("metal-01 lots=1\n", "hosts"),
        ("a:2\n", "hosts"),
        ("rank 0=a slot=0\n", "hosts"),
        ("mesh_descriptors {\n  name: 'M0'\n}\n", "mgd"),
        ("top_level_instance: { mesh { mesh_id: 0 } }\n", "mgd"),
        ("  ChipSpec: {arch: wormhole_b0}\n  Mesh: []\n", "mgd"),
        ("{rank_bindings: [{rank: 0, mesh_id: 0}]}\n", "bindings"),
        ("subcontext_id_to_rank_bindings:\n  0: a.yaml\n", "bindings"),
        ("subcontext_id_to_mesh_graph_descriptor:\n  0: a.yaml\n", "mapping"),
        ("rank_bindings: []\nsubcontext_id_to_mesh_graph_descriptor:\n  0: a.yaml\n", "bindings"),
        ("rank_to_cluster_mock_cluster_desc:\n  0: a.yaml\n", "mapping"),
        ("user: ann\nport: 22\n", "cluster"),
        ("training_config:\n  steps: [\n", "train"),
        ("---\nown_config:\n  x: 1\n", "train"),
    ],
)
def test_what_stands_in_a_file_decides(text, kind):
    check(text, kind, name="cluster_train_bindings.txt")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lab/hosts.txt", "hosts"),
        ("hostfile", "hosts"),
        ("my-mgd.yaml", "mgd"),
        ("cluster.yaml", "cluster"),
        ("train.yaml", "train"),
        ("hosts/notes.yaml", None),
    ],
)
def test_the_name_decides_where_the_text_does_not(name, kind):
    check("# nothing yet\n", kind, name=name)


def test_of_several_kinds_the_name_takes_its_own_and_the_others_are_said():
    check("port: 22\ntraining_config:\n", "cluster", others=["train"], name="notes.yaml")
    check("port: 22\ntraining_config:\n", "train", others=["cluster"], name="train.yaml")


@pytest.mark.parametrize(
    "line",
    ["a" + " " * 300000 + "!", "h " + "a = b " * 50000 + "!", "pinnings" + " " * 300000 + "!", "a slots" + " " * 300000, "slots " * 50000, "[" * 300000, "a" * 300000 + "!"],
    ids=["spaces", "values", "a field", "a key", "words", "brackets", "letters"],
)  # fmt: skip
def test_a_long_line_is_recognised_at_once(line):
    began = time.process_time()
    recognise(Source("x", f"{line}\n"))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a\nb\n", Kind.HOSTS),
        ("a slots=1\n", Kind.HOSTS),
        ("wormhole\n", None),
        ("these lines describe\nthe cluster of the lab\n", None),
        ("port: 22\ntraining_config:\n", None),
        ("rank_bindings: []\n", Kind.BINDINGS),
    ],
)
def test_only_a_clear_content_is_said_to_be_of_a_kind(text, kind):
    assert kind == kind_of_content(Source("x", text))


def test_keys_that_no_file_has_say_nothing():
    check("colour: blue\n", None)
