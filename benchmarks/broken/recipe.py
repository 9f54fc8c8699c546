"""Two workers and a server for `benchmarks/attribution.py`, of which one is broken."""

from ttlaunch.recipe import ConfigFile, Layout, Recipe


class Config(ConfigFile):
    """Sockets and devices as in every recipe."""


RECIPE = Recipe(
    summary="Workers send, a server answers, and one of them breaks.",
    config=Config,
    layouts=[Layout("broken", worker=2, server=1)],
    flows=[("worker", "server")],
    uses_data=False,
)
