"""The reference names the bounds of every key of a training file, and these are the bounds that ttlaunch applies."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from ttlaunch.diagnostics import Severity
from ttlaunch.spec.recipe.config import load_config
from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe
from ttlaunch.spec.recipe.sections import TrainingFile

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/recipe.py"))
STAGES = "multihost_config.pipeline_parallel_config"
NUMBER = re.compile(r"(?P<kind>whole number|number)(?P<bounds>(?:,? [≥>≤<] [\d,.e+-]*\d)*)")
BOUND = re.compile(r"([≥>≤<]) ([\d,.e+-]*\d)")
LEAST_STEP = {"whole number": 1, "number": 1e-30}


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(ROOT / "docs"))  # as `python docs/generate.py` has it, for the module beside it
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


def printed_types(page):
    """The dotted keys of a page of the reference, each with its type as printed."""
    found, section = {}, ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif row := re.match(r"\| `(\w+)` \| (.+?) \| (?:`|required)", line):
            found[f"{section}.{row[1]}"] = row[2]
    return found


def probes(text):
    """Values at the printed bounds and just beyond them, each with whether the page says that it is accepted."""
    for number in NUMBER.finditer(text):
        for sign, written in BOUND.findall(number["bounds"]):
            bound = float(written.replace(",", ""))
            bound = int(bound) if number["kind"] == "whole number" else bound
            step = max(LEAST_STEP[number["kind"]], 0 if isinstance(bound, int) else abs(bound) * 1e-9)
            inward = step if sign in "≥>" else -step
            yield from [(number, bound, True), (number, bound - inward, False)] if sign in "≥≤" else []
            yield from [(number, bound + inward, True), (number, bound, False)] if sign in "><" else []


def shaped(text, number, value):
    """The value in the list or mapping that the type describes, as YAML."""
    before, after = text[: number.start()], text[number.end() :]
    if before.endswith("{"):
        return json.dumps(None) if value is None else f"{{{value}: 1}}"
    if re.search(r"\{[^{}]*: $", before) and "}" in after:
        return f"{{0: {value}}}"
    if items := re.search(r"list \((not empty|(\d+) items)\) of $", before):
        return json.dumps([value] * int(items[2] or 1))
    return json.dumps(value)


def is_refused(recipe, key, text):
    """Whether the value alone is refused: by the schema, or by a rule about this key that names no other."""
    overrides = [] if not key.startswith(STAGES) else [f"{STAGES}.blocks_per_rank=[4]"]
    loaded = load_config(recipe, None, overrides=[*overrides, f"{key}={text}"])
    if loaded.config is None:
        return True
    problems = [one for layout in recipe.layouts for check in recipe.checks for one in check(loaded.config, layout)]
    return any(one.key == key and not one.others and one.severity is Severity.ERROR for one in problems)


@pytest.mark.parametrize("name", RECIPES)
def test_a_value_is_accepted_exactly_within_the_printed_bounds(generate, name):
    recipe = load_recipe(find_recipe(name, working_folder=Path("/")))
    types = printed_types(generate._sections("", recipe.config, ""))
    wrong, tried = [], 0
    for key, text in types.items():
        if any(key == unread or key.startswith(f"{unread}.") for unread in recipe.unread):
            continue
        cases = [(shaped(text, number, value), accepted) for number, value, accepted in probes(text)]
        refused = {value: is_refused(recipe, key, value) for value, _ in cases}
        if all(refused.values()):  # the recipe takes no value of this key but null, as it says in a message of its own
            continue
        tried += len(cases)
        wrong += [f"{key}={value}: the page says {text}" for value, accepted in cases if refused[value] == accepted]
    assert [] == wrong
    assert tried >= (60 if issubclass(recipe.config, TrainingFile) else 4)


def test_the_page_of_the_training_file_is_made_by_the_same_function(generate):
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert printed_types(page)[f"{STAGES}.blocks_per_rank"].startswith("list (not empty) of whole number ≥ 1")
    assert printed_types(page) == printed_types(generate._sections("", generate._Documented, ""))
