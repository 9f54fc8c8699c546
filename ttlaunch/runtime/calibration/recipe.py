"""What a calibration is: the plan to rehearse, and where to write what was found. No torch here: the launcher reads it."""

from typing import Annotated

from pydantic import Field

from ttlaunch.recipe import ConfigFile, Layout, Recipe, Section, all_pairs


class CalibrationConfig(Section):
    """What is measured, and for how long."""

    plan: str = Field("", description="plan.json of the run whose steps are rehearsed")
    folder: str = Field("", description="where each copy writes what it has found")
    seconds: Annotated[float, Field(gt=0, le=60)] = Field(4.0, description="time for the steps; messages take one more")


class Config(ConfigFile):
    """Transport and devices as in every recipe, and the plan."""

    calibration_config: CalibrationConfig = CalibrationConfig()


RECIPE = Recipe(
    summary="Measures messages, and rehearses the steps of a plan.",
    config=Config,
    layouts=[Layout("all", copy=None)],
    flows=[all_pairs("copy")],
    uses_data=False,
)
