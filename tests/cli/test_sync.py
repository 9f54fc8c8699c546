"""`ttlaunch sync` as it is typed: what it prints, and how it ends, with this machine as the only host."""

import json
import re

import pytest


@pytest.fixture
def home(monkeypatch, tmp_path_factory):
    """Where this machine, as a host, keeps what it is sent."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


def test_a_table_says_what_went_where(here, home, ttlaunch):
    (here / "train.py").write_text("1")
    first, second = ttlaunch("sync --on local"), ttlaunch("sync --on local")
    assert (0, "", 0, "") == (first.status, first.stderr, second.status, second.stderr)
    heading, columns, row = first.stdout.splitlines()
    tree_hash = (home / ".ttlaunch/current").readlink().name
    assert re.fullmatch(rf"{here}: \d+ files, [0-9.]+ MB, tree {tree_hash[:12]}", heading)
    assert ["host", "files", "sent", "seconds"] == columns.split()
    assert re.fullmatch(rf"localhost +\d+ +[0-9.]+ [kM]B +[0-9.]+  {home}/.ttlaunch", row)
    assert re.fullmatch(r"localhost +0 +0 bytes +[0-9.]+  was there already", second.stdout.splitlines()[2])


def test_json_is_one_object(here, home, ttlaunch):
    (here / "train.py").write_text("1")
    planned = json.loads(ttlaunch("sync --on local --dry-run --format json").stdout)
    said = json.loads(ttlaunch("sync --on local --format json").stdout)
    assert ["schema", "tree_hash", "project", "files", "bytes", "hosts", "diagnostics"] == list(said)
    assert (str(here), planned["tree_hash"], []) == (said["project"], said["tree_hash"], said["diagnostics"])
    (row,), (plan,) = said["hosts"], planned["hosts"]
    common = {"host", "remote_folder", "files", "already_there", "pruned", "repaired", "differing_data", "error"}
    assert common | {"release", "data", "sent_bytes", "seconds"} == row.keys()
    assert common | {"bytes"} == plan.keys()
    assert plan["files"] == row["files"]


def test_one_line_for_each_host(here, home, ttlaunch):
    (here / "train.py").write_text("1")
    answer = ttlaunch("sync --on local --format concise")
    host, sent, release = answer.stdout.rstrip("\n").split("\t")
    assert "localhost" == host
    assert int(sent) > 0
    assert (home / ".ttlaunch/current").resolve() == home.resolve().joinpath(release)


def test_a_recipe_and_its_default_text_go_along(here, home, ttlaunch):
    said = json.loads(ttlaunch("sync hierarchical_parallel --on local --format json").stdout)
    ((sha256, path),) = said["hosts"][0]["data"].items()
    assert str(home / ".ttlaunch/data" / sha256) == path


def test_a_folder_that_is_not_there_is_refused(here, home, ttlaunch):
    answer = ttlaunch("sync --on local --folder nowhere")
    assert (2, "") == (answer.status, answer.stdout)
    assert "nowhere" in answer.stderr
    assert [] == list(home.iterdir())


def test_an_unknown_recipe_is_refused_before_any_host_is_asked(refused, home):
    refused("sync no_such_recipe --on local", status=2)
    assert [] == list(home.iterdir())


def test_a_target_in_the_way_ends_with_status_5(here, home, ttlaunch):
    (here / "train.py").write_text("1")
    (home / ".ttlaunch").write_text("")
    answer = ttlaunch("sync --on local")
    message = f"error[S010]: {home}/.ttlaunch/releases on localhost cannot be written: not a directory"
    assert (5, message) == (answer.status, answer.stderr.splitlines()[0])
    assert "localhost" in answer.stdout
    assert "not synced" in answer.stdout
