"""How many bytes the workers move, as a formula. No torch here: the launcher reads it."""

from typing import Any

from ttlaunch.recipe import Ranks, Traffic, local_steps_traffic


def traffic(config: Any, ranks: Ranks) -> list[Traffic]:
    """Return the traffic of one average every `every` steps; an outer step sends nothing."""
    return local_steps_traffic(config, ranks, every=config.diloco_config.every)
