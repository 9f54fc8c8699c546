"""Without git, the rules of `.gitignore` files mean what they mean to git."""

import os
import random
import shutil
import time

import pytest

from tests.hosts.sync.rule_sets import RuleSet, draw_rule_set, has_quirk, write
from ttlaunch.hosts.sync.ignore import GIT_RULES, IgnoreRules
from ttlaunch.hosts.sync.listing import collect

NO_GIT = {"PATH": "/nowhere"}


@pytest.fixture
def asked(surroundings, tmp_path):
    """The environment in which git is asked: without settings of the user."""
    return {**surroundings, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}


@pytest.fixture
def listed(asked):
    """`listed(folder)`: the files and folders that would be copied; asserts that they are the same with git and without."""

    def look(folder, told=None):
        with_git, without = (collect(os.fsencode(folder), environment=each) for each in (asked, NO_GIT))
        assert (None, "there is no git") == (with_git.without_git, without.without_git)
        assert (with_git.paths, with_git.folders) == (without.paths, without.folders), told
        return {os.fsdecode(path) for path in without.paths}

    return look


def test_files_below_a_folder_that_a_rule_names_again_are_copied(repository, listed):
    write(RuleSet({"": b"data/**\n!data/keep/**\n!data/keep\n"}, ["data/a", "data/keep/b", "data/other/c"]), repository)
    assert {".gitignore", "data/keep/b"} == listed(repository)


@pytest.mark.parametrize(
    "count", [pytest.param(40, id="40 sets"), pytest.param(1500, id="1500 sets", marks=pytest.mark.slow)]
)
def test_git_and_ttlaunch_copy_the_same_files_for_random_rules_and_trees(tmp_path, asked, listed, count):
    probe = tmp_path / "probe"
    probe.mkdir()
    quirks = has_quirk(probe, asked)
    effective = 0
    for seed in range(count):
        numbers = random.Random(seed)  # noqa: S311 - the same sets each time
        drawn, own = draw_rule_set(numbers, quirks=quirks), draw_rule_set(numbers, quirks=quirks)
        folder = tmp_path / "tree"
        folder.mkdir()
        write(drawn, folder)
        if seed % 2:
            (folder / ".ttlaunchignore").write_bytes(own.rules[""])
        copied = listed(folder, told=(seed, drawn))
        effective += not copied.issuperset(path for path in drawn.files if not path.endswith("/"))
        shutil.rmtree(folder)
    assert effective > count / 4


def test_rules_from_the_root_of_the_repository_hold_in_a_folder_of_it(repository, listed):
    rules = {"": b"*.log\n/sub/out\n", "sub": b"!keep.log\n"}
    write(RuleSet(rules, ["sub/a.py", "sub/b.log", "sub/keep.log", "sub/out/c", "sub/deep/out"]), repository)
    assert {".gitignore", "a.py", "keep.log", "deep/out"} == listed(repository / "sub")


def test_rules_of_the_repository_alone_hold_too(repository, listed):
    write(RuleSet({"": b"!c.txt\n"}, ["a.py", "b.txt", "c.txt"]), repository)
    (repository / ".git/info").mkdir(exist_ok=True)
    (repository / ".git/info/exclude").write_text("*.txt\n")
    assert {".gitignore", "a.py", "c.txt"} == listed(repository)


def test_a_repository_inside_has_only_its_own_rules(repository, listed):
    write(RuleSet({"": b"*.log\n"}, ["a.log", "inner/b.log", "inner/c.txt", "not_one/d.log"]), repository)
    (repository / "not_one/.git").mkdir()
    write(RuleSet({"": b"*.txt\n"}, []), repository / "inner")
    assert {".gitignore", "inner/.gitignore", "inner/b.log"} == listed(repository)


def test_rules_behind_a_link_are_not_read(repository, listed):
    write(RuleSet({"": b""}, ["a.log", "rules"]), repository)
    (repository / "rules").write_text("*.log\n")
    (repository / ".gitignore").unlink()
    (repository / ".gitignore").symlink_to("rules")
    assert {".gitignore", "a.log", "rules"} == listed(repository)


def test_an_ignored_folder_inside_an_empty_one_is_not_copied_but_the_empty_one_is(repository, asked):
    write(RuleSet({"": b"*/**/\n"}, ["outer/inner/"]), repository)
    for environment in (asked, NO_GIT):
        assert {b"outer"} == collect(os.fsencode(repository), environment=environment).folders


def test_a_range_that_counts_down_stands_for_its_first_character(repository, listed):
    write(RuleSet({"": b"x[c-a]\n"}, ["xa", "xb", "xc", "x-"]), repository)
    assert {".gitignore", "xa", "xb", "x-"} == listed(repository)


def test_a_space_after_a_backslash_is_part_of_the_name(project, copied):
    write(RuleSet({}, ["a", "a ", "b"]), project)
    (project / ".ttlaunchignore").write_text("a\\  \n")
    shutil.rmtree(project / ".git")
    assert [".ttlaunchignore", "a", "b"] == copied(project)


def test_a_pattern_with_many_wildcards_is_compared_at_once(tmp_path):
    (tmp_path / ".gitignore").write_text("*a" * 60 + "b\n" + "**/a*a/" * 30 + "b\n")
    rules = IgnoreRules(os.fsencode(tmp_path), GIT_RULES)
    rules.read(b"")
    began = time.process_time()
    assert rules.verdict(b"a" * 250) is None
    assert rules.verdict(b"aaaaaaaa/" * 200 + b"c") is None
    assert time.process_time() - began < 1
