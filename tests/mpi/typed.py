"""Commands of real runs as a user types them, in a folder of their own."""

import os
import subprocess
import sys

from tests.forked import FORKED


def words_of(*words):
    return [sys.executable, "-m", "ttlaunch", *words]


def how_in(folder):
    return {"cwd": folder, "env": {**os.environ, "NO_COLOR": "1"}, "text": True}


def command(folder, *words):
    """The ended command, with what it has printed."""
    return subprocess.run(words_of(*words), capture_output=True, check=False, **how_in(folder))


def train(folder, recipe, sets, *, ranks=1):
    """Train a small model, whose run and checkpoints are below the folder then."""
    options = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")] + [*FORKED] * (ranks > 1)
    done = command(folder, "run", recipe, "-n", str(ranks), *options, "--format", "json")
    assert 0 == done.returncode, done.stderr
