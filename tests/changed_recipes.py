"""Copies of recipes with a line more, for tests that need a step to be slow, or to break."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copied_recipe(folder, recipe="data_parallel"):
    """Copy a recipe to a folder that is not there; returns its trainer's file."""
    shutil.copytree(ROOT / "recipes" / recipe, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "trainer.py"


def write_before(file, line, added):
    """Write lines before the one line of a file that is like this, each with its end; returns the number of the first of them."""
    text = file.read_text(encoding="utf-8")
    assert text.count(line) == 1
    file.write_text(text.replace(line, added + line), encoding="utf-8")
    return text[: text.index(line)].count("\n") + 1


def changed_recipe(here, before, added, *, recipe="data_parallel", indent=12):
    """Write a copy of a recipe with a line more; returns the place of the line."""
    line = f"{' ' * indent}{added}"
    trainer = copied_recipe(here / "mine", recipe)
    trainer.write_text(trainer.read_text().replace(before, f"{before}\n{line}", 1))
    return f"trainer.py:{1 + trainer.read_text().splitlines().index(line)}"


def slow_recipe(here, *, recipe="data_parallel", until="quick", pause_s=0.5):
    """Write a copy of a recipe whose steps after the sixth pause until there is the file `until`, so that others can come."""
    slow = f"(step > 6 and not __import__('os').path.exists({until!r})) and __import__('time').sleep({pause_s})"
    changed_recipe(
        here, "for step in loop.steps():", slow, recipe=recipe, indent=12 if recipe == "data_parallel" else 8
    )
