"""What the smallest recipe is: its configuration, its one role, who talks to whom. No torch here: the launcher reads it."""

from typing import Annotated, ClassVar

from pydantic import Field

from ttlaunch.recipe import ConfigFile, Layout, Recipe, Section, all_pairs


class AllReduceConfig(Section):
    """What is reduced, and how often."""

    noun: ClassVar[str] = "all_reduce_config"

    megabytes: Annotated[float, Field(gt=0)] = Field(16.0, description="size of the vector; 1 MB = 1,000,000 bytes")
    repeats: Annotated[int, Field(ge=1)] = Field(20, description="measured all-reduces, after one that is not")


class Config(ConfigFile):
    """Sockets and devices as in every recipe, and the vector."""

    all_reduce_config: AllReduceConfig = AllReduceConfig()


RECIPE = Recipe(
    summary="Every rank adds a vector of its own; checks the sum and measures the bandwidth.",
    config=Config,
    layouts=[Layout("all", peer=None)],
    flows=[all_pairs("peer")],
    unread=[
        "multihost_config.enabled",
        "multihost_config.bucket_megabytes",
        "multihost_config.pipeline_parallel_config",
    ],
    uses_data=False,
)
