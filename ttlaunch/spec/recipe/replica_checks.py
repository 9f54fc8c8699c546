"""The rule of recipes whose workers are a grid, with a row for each replica of what the workers of a row share."""

from collections.abc import Iterator
from typing import Any

from ttlaunch.spec.recipe.declare import Layout, Problem


def every_replica_has_as_many_workers(config: Any, layout: Layout) -> Iterator[Problem]:
    """The replicas of `fully_sharded_config` share the workers evenly."""
    workers, replicas = layout.counts(config).get("worker", 0), config.fully_sharded_config.replicas
    if workers % replicas:
        yield Problem(
            "C065",
            f"{workers} workers cannot be shared evenly by {replicas} replicas",
            "fully_sharded_config.replicas",
            f"{workers} / {replicas} leaves {workers % replicas}",
            others=(("multihost_config.num_workers", "shared by the replicas"),),
            hints=("`replicas: 1` fits any number of workers",),
        )
