"""Equal ranks for `benchmarks/hangs.py`, of which one gets stuck."""

from ttlaunch.recipe import ConfigFile, Layout, Recipe, all_pairs

RECIPE = Recipe(
    summary="Ranks that add up a small vector, until one gets stuck.",
    config=ConfigFile,
    layouts=[Layout("all", peer=None)],
    flows=[all_pairs("peer")],
    uses_data=False,
)
