"""The smallest recipe there is, for tests of ranks that do what a trainer's text says: any number of equal peers, no data."""

PEERS = """\
from ttlaunch.recipe import ConfigFile, Layout, Recipe, all_pairs


class Config(ConfigFile):
    pass


RECIPE = Recipe(
    summary="Ranks that do what a test wants.",
    config=Config,
    layouts=[Layout("all", peer=None)],
    flows=[all_pairs("peer")],
    uses_data=False,
)
"""


def write_peers(folder, trainer):
    """A new folder with the recipe, whose `def peer(cfg, ctx)` follows two lines of imports."""
    folder.mkdir()
    (folder / "recipe.py").write_text(PEERS)
    (folder / "trainer.py").write_text("import time, torch\nfrom .recipe import Config\n" + trainer)
    return folder
