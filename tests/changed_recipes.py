"""Copies of recipes with a line more, for tests that need a step to be slow, or to break."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


def changed_recipe(here, before, added, *, recipe="data_parallel", indent=12):
    """Write a copy of a recipe with a line more; returns the place of the line."""
    copy, line = here / "mine", f"{' ' * indent}{added}"
    shutil.copytree(ROOT / "recipes" / recipe, copy)
    trainer = copy / "trainer.py"
    trainer.write_text(trainer.read_text().replace(before, f"{before}\n{line}", 1))
    return f"trainer.py:{1 + trainer.read_text().splitlines().index(line)}"


def slow_recipe(here, *, recipe="data_parallel"):
    """Write a copy of a recipe whose steps after the sixth take half a second until there is a file `quick`, so that others can come."""
    slow = "(step > 6 and not __import__('os').path.exists('quick')) and __import__('time').sleep(0.5)"
    changed_recipe(
        here, "for step in loop.steps():", slow, recipe=recipe, indent=12 if recipe == "data_parallel" else 8
    )
