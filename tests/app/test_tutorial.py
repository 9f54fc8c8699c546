"""The tutorial about Python does what it says."""

import re
from pathlib import Path

import pytest

import ttlaunch
from tests.forked import FORKED_IN_PYTHON

PAGE = Path(__file__).parents[2] / "docs/tutorials/sweep-from-python.md"


SMALLER = {"transformer_config.embedding_dim": 32, "training_config.batch_size": 8}


def smaller(function, *, is_run):
    """A function of the library with a smaller model and, if it is a run, with ranks that are forked."""

    def call(recipe, **options):
        forked = FORKED_IN_PYTHON if is_run else {"set": {}}
        return function(recipe, **options | forked | {"set": options["set"] | forked["set"] | SMALLER})

    return call


@pytest.mark.mpi
@pytest.mark.slow
def test_the_sweep_from_python_runs_as_it_stands(here, capsys, monkeypatch):
    """With a smaller model, and with ranks that are forks of one process for each run, because each would import torch."""
    for name in ("run", "start", "simulate"):
        monkeypatch.setattr(ttlaunch, name, smaller(getattr(ttlaunch, name), is_run=name != "simulate"))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert 4 == len(blocks)
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - the page is ours, and running it is the test
    printed = capsys.readouterr().out
    assert 4 == len(re.findall(r"^[\d.e-]+: done, validation loss \d", printed, flags=re.MULTILINE))
    assert printed.endswith("optimizer\nTrue\nTrue\n")
    assert names["losses"][-1] < names["losses"][0]
