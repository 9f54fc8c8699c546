"""How many bytes the workers move, as a formula. No torch here: the launcher reads it."""

from typing import Any

from ttlaunch.recipe import Ranks, Traffic, local_steps_traffic


def traffic(config: Any, ranks: Ranks) -> list[Traffic]:
    """Of an average every so many steps; an outer step sends nothing."""
    return local_steps_traffic(config, ranks, every=config.diloco_config.every)
