"""The pictures of the docs are those that `docs/pictures.py` takes, all of them, and each is shown where it is explained (X10)."""

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_every_picture_that_is_taken_is_there_in_both_schemes_and_the_page_shows_each_view():
    runs = {kind: kind for kind in ("done", "failed", "elastic", "serving", "printed")}
    taken = runpy.run_path(str(DOCS / "pictures.py"))["views_of"](**runs)
    there = {path.name for path in (DOCS / "images").glob("dashboard-*.png")}
    assert {f"dashboard-{view}-{scheme}.png" for view in taken for scheme in ("light", "dark")} == there
    shown = re.findall(r"images/(dashboard-[\w-]+\.png)", (DOCS / "how-to/look-at-runs-in-a-browser.md").read_text())
    assert sorted(f"dashboard-{view}-light.png" for view in taken) == sorted(shown)
