"""The bug museum's last but one room: what is read from a channel, and which keys anybody reads."""

import ast
from pathlib import Path

import pytest

import ttlaunch
from ttlaunch.contract import pack_frame
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.recipe import Section
from ttlaunch.runtime.parallel.staleness import means
from ttlaunch.spec.recipe.importing import import_recipe_module

from .judge import Judge
from .test_parts import exhibit

ROOT = Path(ttlaunch.__file__).parents[1]
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/recipe.py"))


class Halting:
    """A program whose answer stops within, until the reader's time is over; an answer may well hold another one."""

    def __init__(self):
        inside = pack_frame({"bytes_per_s": 1e9})
        self.parts = [pack_frame({"file": "answers"}, inside)[: -len(inside)], inside]

    def read(self, most, *, timeout_s):
        if not self.parts[0]:
            self.parts.pop(0)
            raise HostError("box", Trouble.TIMED_OUT, f"nothing came within {timeout_s} s")
        part, self.parts[0] = self.parts[0][:most], self.parts[0][most:]
        return part

    def stderr(self):
        return b""


def heard(stream):
    """What a reader gets who asks twice."""
    for _ in range(2):
        try:
            yield stream.receive(timeout_s=0.1)[0]
        except HostError as error:
            yield error.trouble


def test_a_reader_that_forgets_half_a_message_is_caught():
    """Bug 19: ours says twice that nothing came in time, and the exhibit brings an answer that nobody has given."""
    assert [Trouble.TIMED_OUT] * 2 == list(heard(FrameStream("box", Halting())))
    assert {"bytes_per_s": 1e9} == next(heard(exhibit("bug_19_timeout_loses_the_framing").STREAM("box", Halting())))


def test_two_streams_on_one_channel_are_caught(tmp_path, corpus, monkeypatch):
    """Bug 26: `classic_dp`, whose steps overtake each other, with a channel for each step and with one for all."""
    judge = Judge(tmp_path, corpus)
    ours, outcome = judge.train("classic_dp", ["worker"] * 3)
    assert ({}, []) == (outcome.errors, outcome.findings)
    assert ours.sha256
    monkeypatch.setattr(means, "BoundedMeans", exhibit("bug_26_two_streams_on_one_channel").MEANS)
    wrong, outcome = judge.train("classic_dp", ["worker"] * 3)
    assert ({}, []) == (outcome.errors, [finding.code for finding in outcome.findings])
    with pytest.raises(AssertionError, match="ranks hold different parameters"):
        _ = wrong.sha256


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_every_key_of_our_recipes_is_read(folder, read_by_us):
    """Bug 24: by the recipe if the section is its own, else by anybody; or it is declared as unread, and refused (C018)."""
    recipe = import_recipe_module(folder, "recipe").RECIPE
    assert [] == unread_keys(recipe, folder.glob("*.py"), read_by_us=read_by_us)


def test_a_key_that_nothing_reads_is_caught(read_by_us):
    """Bug 24."""
    recipe = exhibit("bug_24_key_that_nothing_reads").RECIPE
    found = unread_keys(recipe, [ROOT / "tests/museum/loop.py"], read_by_us=read_by_us)
    assert ["museum_config.gradient_noise"] == found


@pytest.fixture(scope="module")
def read_by_us():
    recipes = [import_recipe_module(folder, "recipe").RECIPE for folder in RECIPES]
    recipes.append(exhibit("bug_24_key_that_nothing_reads").RECIPE)
    wanted = {last_part(key) for recipe in recipes for key, _ in keys_of(recipe.config())}
    return names_read((ROOT / "ttlaunch").rglob("*.py"), wanted)


def unread_keys(recipe, own_files, *, read_by_us):
    """Keys of a recipe's configuration whose name nobody asks for who could."""
    keys = list(keys_of(recipe.config()))
    names = {True: read_by_us, False: names_read(own_files, {last_part(key) for key, _ in keys})}
    return [
        key
        for key, is_shared in keys
        if last_part(key) not in names[is_shared]
        if not any(key.startswith(unread) for unread in recipe.unread)
    ]


def keys_of(section, prefix=""):
    """Dotted keys, and whether the section is one that recipes share."""
    for name, value in section:
        if isinstance(value, Section):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", type(section).__module__.startswith("ttlaunch.")


def last_part(key):
    return key.rpartition(".")[2]


def names_read(files, wanted):
    """Which of some names are attributes or keys in quotes; files with nothing that is still looked for are not parsed."""
    found = set()
    for path in files:
        text = path.read_text()
        if not any(name in text for name in wanted - found):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(last_part(node.value))
    return found
