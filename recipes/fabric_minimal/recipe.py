"""What the smallest recipe is: its configuration, its one role, who talks to whom. No torch here: the launcher reads it."""

from typing import Annotated

from pydantic import Field

from ttlaunch.recipe import VALUE_BYTES, ConfigFile, Layout, Ranks, Recipe, Section, Traffic, all_pairs, shares


class AllReduceConfig(Section):
    """What is reduced, and how often."""

    megabytes: Annotated[float, Field(gt=0, le=10**4)] = Field(
        16.0, description="size of the vector; 1 MB = 1,000,000 bytes"
    )
    repeats: Annotated[int, Field(ge=1)] = Field(20, description="measured all-reduces, after one that is not")


class Config(ConfigFile):
    """Transport and devices as in every recipe, and the vector."""

    all_reduce_config: AllReduceConfig = AllReduceConfig()


def traffic(config: Config, ranks: Ranks) -> list[Traffic]:
    """Each peer sends all shards but one, twice, to the next; of the vector, and of one value a peer to begin together."""
    peers, sizes = ranks.of("peer"), config.all_reduce_config
    found = []
    for place, peer in enumerate(peers if len(peers) > 1 else []):
        after, values = (place + 1) % len(peers), 0
        for length in (len(peers), max(1, int(sizes.megabytes * 1e6 / VALUE_BYTES))):
            shards = shares(length, len(peers))
            values += 2 * length - shards[after] - shards[(place + 2) % len(peers)]
        found.append(Traffic("ring_all_reduce", peer, peers[after], once=(sizes.repeats + 1) * values * VALUE_BYTES))
    return found


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
    traffic=traffic,
    elastic="its sum has a part of every rank",
)
