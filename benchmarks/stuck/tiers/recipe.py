"""Two workers and an aggregator for `benchmarks/hangs.py`, of which one gets stuck."""

from ttlaunch.recipe import ConfigFile, Layout, Recipe

RECIPE = Recipe(
    summary="Workers send, an aggregator answers, and one of them gets stuck.",
    config=ConfigFile,
    layouts=[Layout("tiers", worker=2, aggregator=1)],
    flows=[("worker", "aggregator")],
    uses_data=False,
)
