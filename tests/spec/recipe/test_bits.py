"""Whether a key changes the bits of a training stands where the key is defined, and nowhere else."""

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import Field

from ttlaunch.spec.located.schema import Section
from ttlaunch.spec.recipe.bits import Bits, ReadOnlyWith, deciders, marked
from ttlaunch.spec.recipe.discovery import find_recipe, list_recipes, load_recipe

PACKAGE = Path(__file__).parents[3] / "ttlaunch"
RECIPES = [found.name for found in list_recipes(Path("/nowhere"))]


class Inner(Section):
    noun: ClassVar[str] = "inner"
    marks: ClassVar[tuple[Bits, ...]] = (Bits.FREE,)

    rank: Annotated[int, Bits.SENDERS] = Field(0)


class Outer(Section):
    rate: float = Field(0.1)
    interval: Annotated[int, Bits.FREE, Bits.SENDERS] = Field(1, ge=1)
    decay: Annotated[float, ReadOnlyWith("kind", "adamw")] = Field(0.9)
    kind: str = Field("adamw")
    inner: Inner | None = None


def test_a_mark_is_read_from_the_definition_of_the_key_or_of_its_section():
    assert ("interval", "inner") == marked(Outer, Bits.FREE)
    assert ("interval", "inner.rank") == marked(Outer, Bits.SENDERS)
    assert [("decay", ReadOnlyWith("kind", "adamw"))] == deciders(Outer)


def test_a_key_without_a_mark_changes_the_bits():
    assert not any("rate" in marked(Outer, mark) for mark in Bits)


@pytest.mark.parametrize("name", RECIPES)
def test_what_decides_whether_a_key_is_read_is_a_key_with_that_value(name):
    recipe = load_recipe(find_recipe(name, working_folder=Path("/nowhere")))
    found = deciders(recipe.config)
    assert found or "training_config" not in recipe.config.model_fields
    for path, decider in found:
        section, _, key = decider.key.partition(".")
        model = recipe.config.model_fields[section].annotation
        assert model.model_validate({key: decider.value}), path


def test_no_list_elsewhere_says_which_keys_a_resumed_run_may_change():
    text = (PACKAGE / "planning" / "resume.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"([a-z_]+_config\.[a-z_]+)"', text))
    # The text's place for labels, its steps for a sentence, the schedule's shape and a codec's kind for rules about values, and the
    # length of sequences, which is part of a GPT's shape and of no Llama's.
    told = {"training_config.data_path", "training_config.steps", "scheduler_config.type", "compression_config.kind"}
    told |= {"transformer_config.max_sequence_length"}
    assert named <= told
