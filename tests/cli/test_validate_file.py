"""`ttlaunch validate FILE` checks any single file and says what it was taken for; `-` is standard input."""

import json
import os
from pathlib import Path

import pytest

CONFIGURATION = Path(__file__).parents[2] / "configurations/2loudboxes"
RECIPES = Path(__file__).parents[2] / "recipes"
SHARED = "checked against the sections that recipes share; `--recipe NAME` checks it against one\n"


def check(answer, stdout, *, stderr="", status=0):
    assert (stderr, stdout, status) == (answer.stderr, answer.stdout, answer.status)


@pytest.fixture
def copied(here):
    """Copies of the files of a configuration, and of a training file."""
    for path in [*CONFIGURATION.iterdir(), RECIPES / "hierarchical_parallel/train.yaml"]:
        (here / path.name).write_text(path.read_text())


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hosts.txt", "is consistent as a hostfile: 2 hosts, 2 slots\n"),
        ("mgd.yaml", "is consistent as a mesh graph descriptor: 2 meshes, 1 link\n"),
        (
            "rank_bindings.yaml",
            "is consistent as a rank bindings file: 2 ranks bound, 2 meshes, 1 link\ndescriptor found: beside {bindings}\n",
        ),
        ("train.yaml", f"is consistent as a training file\n{SHARED}"),
    ],
)
def test_a_sound_file_is_named_with_its_kind_from_a_path_and_from_standard_input(
    ttlaunch, here, name, text, monkeypatch
):
    monkeypatch.setenv("HOME", "/home/ann")
    check(ttlaunch(["validate", name]), f"{name} {text.format(bindings=name)}")
    answer = ttlaunch(["validate", "-"], stdin=(here / name).read_bytes())
    check(answer, f"standard input {text.format(bindings='standard input')}")


def test_a_textproto_and_a_cluster_file_are_checked_too(ttlaunch, here):
    ttlaunch(["convert", str(CONFIGURATION / "mgd.yaml"), "graph.textproto"])
    (here / "c.yaml").write_text("port: 2222\n")
    check(
        ttlaunch("validate graph.textproto"),
        "graph.textproto is consistent as a mesh graph descriptor: 2 meshes, 1 link\n",
    )
    check(ttlaunch("validate c.yaml"), "c.yaml is consistent as a cluster file: settings that hosts are reached with\n")


@pytest.mark.usefixtures("copied")
def test_a_training_file_is_checked_against_a_recipe(ttlaunch):
    check(
        ttlaunch("validate train.yaml --recipe hierarchical_parallel"),
        "train.yaml is consistent as a training file\nchecked against hierarchical_parallel\n",
    )


def test_a_section_that_only_a_recipe_knows_is_a_warning_without_the_recipe(ttlaunch):
    path = RECIPES / "fabric_minimal/train.yaml"
    answer = ttlaunch(["validate", str(path), "--format", "concise"])
    message = "unknown key `all_reduce_config` in the training file"
    check(
        answer,
        f"{path} is consistent as a training file\n{SHARED}",
        stderr=f"{path}:2:1: warning[C004]: {message}\n",
    )
    hint = "hint: `--recipe NAME` checks the sections that a recipe adds"
    assert hint in ttlaunch(["validate", str(path)]).stderr.splitlines()
    assert 0 == ttlaunch(["validate", str(path), "--recipe", "fabric_minimal"]).status


def test_a_misspelled_section_is_an_error_without_a_recipe(refused):
    refused("validate train.yaml", files={"train.yaml": "trainning_config:\n  steps: 3\n"}, status=3)


def test_rules_of_every_recipe_hold_for_a_training_file_alone(refused):
    text = "transformer_config:\n  embedding_dim: 64\n  num_heads: 5\n"
    refused("validate -", stdin=text.encode(), status=3)


def test_rank_bindings_alone_find_their_missing_descriptor(refused):
    text = 'rank_bindings:\n  - {rank: 0, mesh_id: 0}\nmesh_graph_desc_path: "mgd.yaml"\n'
    refused("validate lab/new/some.yaml", files={"lab/new/some.yaml": text}, status=3)


def test_a_file_that_could_be_two_kinds_says_which_it_was_taken_for(refused):
    refused("validate x.yaml", files={"x.yaml": "port: 0\ntraining_config: {steps: 3}\n"}, status=3)


def test_a_file_of_no_known_kind_is_refused(refused):
    refused("validate notes.yaml", files={"notes.yaml": "colour: blue\n"}, status=3)


def test_a_kind_that_was_said_is_taken(refused):
    refused("validate notes.yaml --kind cluster", files={"notes.yaml": "colour: blue\n"}, status=3)


def test_an_unknown_kind_is_refused(refused):
    refused("validate notes.yaml --kind bonds", files={"notes.yaml": "colour: blue\n"}, status=2)


def test_a_file_that_is_not_there_is_refused(refused):
    refused("validate host.txt", files={"hosts.txt": "a slots=1\n"}, status=2)


def test_an_empty_file_is_refused(refused):
    refused("validate hosts.txt", files={"hosts.txt": ""}, status=3)


def test_options_of_a_configuration_are_refused_with_a_file(refused):
    refused("validate hosts.txt --ranks 2 -c train.yaml", files={"hosts.txt": "a slots=1\n"}, status=2)


def test_a_recipe_is_refused_with_a_file_that_it_does_not_read(refused):
    refused("validate hosts.txt --recipe fabric_minimal", files={"hosts.txt": "a slots=1\n"}, status=2)


def test_mistakes_of_a_file_are_given_in_every_format(ttlaunch, here):
    (here / "h").write_text("metal-01 lots=1\n")

    concise = ttlaunch("validate h --format concise")
    github = ttlaunch("validate h --format github")
    answer = json.loads(ttlaunch("validate h --format json").stdout)

    assert "h:1:10: error[T012]: unknown word `lots=1` after host `metal-01`\n" == concise.stderr
    assert github.stderr.startswith("::error file=h,line=1,col=10,title=T012::")
    assert (False, "hosts", ["T012"]) == (
        answer["valid"],
        answer["kind"],
        [found["code"] for found in answer["diagnostics"]],
    )


def test_the_name_of_a_configuration_goes_before_a_file_of_that_name(ttlaunch, here):
    (here / "2loudboxes").write_text("colour: blue\n")
    assert ttlaunch("validate 2loudboxes").stdout.startswith("2loudboxes is consistent: 2 hosts")


def test_set_changes_a_training_file_and_no_other(refused):
    files = {"train.yaml": "training_config:\n  batch_size: 16\n"}
    refused("validate train.yaml --set training_config.batch_size=0", files=files, status=3)


def test_set_is_refused_with_a_file_that_is_no_training_file(refused):
    refused("validate hosts.txt --set a.b=1", files={"hosts.txt": "a slots=1\n"}, status=2)


def test_a_link_to_nowhere_is_not_there(ttlaunch, here):
    (here / "hosts.txt").symlink_to("nowhere")
    check(ttlaunch("validate hosts.txt"), "", stderr="error[P005]: hosts.txt does not exist\n\n", status=2)


def test_an_endless_file_is_not_read_to_its_end(ttlaunch):
    message = "error[P005]: /dev/zero is not a regular file\n\n"
    check(ttlaunch("validate /dev/zero"), "", stderr=message, status=2)


def test_a_named_pipe_is_refused_instead_of_waited_for(refused, here):
    os.mkfifo(here / "pipe")
    refused("validate pipe", status=2)
