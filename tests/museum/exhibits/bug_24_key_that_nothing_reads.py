"""Bug 24: a key is checked, shown and written down, and changes nothing: the trainer has never heard of it."""

from typing import ClassVar

from tests.museum.recipe import RECIPE as WITHOUT
from ttlaunch.recipe import Recipe, Section, TrainingFile


class MuseumConfig(Section):
    noun: ClassVar[str] = "museum_config"

    gradient_noise: float = 0.1  # the bug: nobody reads it


class Config(TrainingFile):
    museum_config: MuseumConfig = MuseumConfig()


RECIPE = Recipe(summary="An exhibit.", config=Config, layouts=WITHOUT.layouts, flows=WITHOUT.flows)
