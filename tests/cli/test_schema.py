"""`ttlaunch schema`: shipped files fit their schemas, a misspelled key doesn't, and every key says what it means."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
BINDINGS = sorted(ROOT.glob("configurations/*/rank_bindings.yaml"))
GRAPHS = sorted(ROOT.glob("configurations/*/mgd.yaml"))
TRAINING = sorted(ROOT.glob("recipes/*/train.yaml"))
SHIPPED = [("bindings", path) for path in BINDINGS] + [("mgd", path) for path in GRAPHS]


def name(value):
    return value if isinstance(value, str) else f"{value.parent.name}-{value.name}"


def recipe_of(path):
    return f"train --recipe {path.parent.name}"


@pytest.fixture
def schema(ttlaunch):
    """`schema("bindings")` is what the command prints, itself a correct schema."""

    def ask(words):
        answer = ttlaunch(f"schema {words}")
        assert ("", 0) == (answer.stderr, answer.status)
        found = json.loads(answer.stdout)
        jsonschema.Draft202012Validator.check_schema(found)
        return jsonschema.Draft202012Validator(found)

    return ask


@pytest.mark.parametrize(("words", "path"), [*SHIPPED, *[(recipe_of(path), path) for path in TRAINING]], ids=name)
def test_a_shipped_file_fits_its_schema_until_a_key_is_misspelled(schema, words, path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [] == [error.message for error in schema(words).iter_errors(content)]
    content["rank_bindingz"] = 1
    assert ["rank_bindingz" in error.message for error in schema(words).iter_errors(content)] == [True]


@pytest.mark.parametrize("path", BINDINGS, ids=name)
def test_a_misspelled_key_of_a_row_does_not_fit(schema, path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    row = content["rank_bindings"][0]
    row["mesh_idd"] = row.pop("mesh_id")
    assert 2 == len(list(schema("bindings").iter_errors(content)))


@pytest.mark.parametrize(
    ("links", "fits"),
    [([["M0", "M1", 2]], True), ([["M0", "M1"]], False), ([["M0", "M1", 0]], False), ([["M0", "X1", 1]], False)],
)
def test_links_have_two_meshes_and_their_channels(schema, links, fits):
    content = yaml.safe_load(GRAPHS[0].read_text(encoding="utf-8"))
    content["RelaxedGraph"] = links
    assert fits == schema("mgd").is_valid(content)


def test_links_of_devices_have_their_own_form(schema):
    content = yaml.safe_load(GRAPHS[0].read_text(encoding="utf-8"))
    del content["RelaxedGraph"]
    content["Graph"] = [[["M0", "D1"], ["M1", "D1"], 1]]
    assert schema("mgd").is_valid(content)
    content["Graph"] = [[["M0", "M1"], ["M1", "D1"], 1]]
    assert not schema("mgd").is_valid(content)


def test_a_recipe_has_its_own_keys_and_not_those_it_never_reads(schema):
    pipeline = {"multihost_config": {"pipeline_parallel_config": {"blocks_per_rank": [1, 1]}}}
    assert schema("train --recipe pipeline_parallel").is_valid(pipeline)
    assert not schema("train --recipe hierarchical_parallel").is_valid(pipeline)
    assert schema("train --recipe fabric_minimal").is_valid({"all_reduce_config": {"repeats": 3}})
    assert not schema("train").is_valid({"all_reduce_config": {"repeats": 3}})


@pytest.mark.parametrize(
    "words", ["bindings", "sub-contexts", "mgd", "cluster", "train", "train --recipe fabric_minimal"]
)
def test_every_key_says_what_it_means_and_no_section_takes_unknown_keys(schema, words):
    whole = copy.deepcopy(schema(words).schema)
    for section in [whole, *whole.get("$defs", {}).values()]:
        assert section["additionalProperties"] is False
        assert [] == [key for key, value in section["properties"].items() if not value.get("description")]


def test_all_schemas_are_written_with_what_to_put_into_a_file(ttlaunch, here):
    answer = ttlaunch("schema --out schemas")
    files = sorted(path.name for path in (here / "schemas").iterdir())
    trains = [f"train.{path.parent.name}.schema.json" for path in TRAINING]
    assert (
        sorted([*(f"{kind}.schema.json" for kind in ("bindings", "sub-contexts", "mgd", "cluster")), *trains]) == files
    )
    assert f"  # yaml-language-server: $schema={here}/schemas/bindings.schema.json\n" in answer.stdout


def test_a_mapping_of_sub_contexts_has_a_schema(schema):
    assert schema("sub-contexts").is_valid({"subcontext_id_to_rank_bindings": {"0": "a.yaml"}})
    assert not schema("sub-contexts").is_valid({"subcontext_to_rank_bindings": {"0": "a.yaml"}})


def test_without_a_name_all_are_printed(ttlaunch):
    assert ["bindings", "sub-contexts", "mgd", "cluster", "train"] == list(json.loads(ttlaunch("schema").stdout))


def test_an_unknown_recipe_has_no_schema(refused):
    refused("schema train --recipe hierarchical_paralel", status=2)


def test_an_unknown_file_has_no_schema(ttlaunch):
    assert 2 == ttlaunch("schema hosts").status


def test_a_folder_for_schemas_that_cannot_be_made_is_refused(ttlaunch, here):
    (here / "taken").touch()
    answer = ttlaunch("schema --out taken")
    assert (2, "", "error[P032]: taken cannot be written: file exists\n\n") == (
        answer.status,
        answer.stdout,
        answer.stderr,
    )
