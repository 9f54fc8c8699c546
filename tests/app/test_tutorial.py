"""The tutorial about Python does what it says."""

import re
from pathlib import Path

import pytest

import ttlaunch
from tests.forked import FORKED_IN_PYTHON

PAGE = Path(__file__).parents[2] / "docs/tutorials/sweep-from-python.md"


def forking(run):
    """`ttlaunch.run` or `ttlaunch.start` of a recipe whose ranks are forked."""
    return lambda recipe, **options: run(
        recipe, **options | {"warm": True, "set": options["set"] | FORKED_IN_PYTHON["set"]}
    )


@pytest.mark.mpi
@pytest.mark.slow
def test_the_sweep_from_python_runs_as_it_stands(here, capsys, monkeypatch):
    """But that its twelve ranks are forks of six processes, because each would import torch for seconds."""
    for name in ("run", "start"):
        monkeypatch.setattr(ttlaunch, name, forking(getattr(ttlaunch, name)))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert 4 == len(blocks)
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - the page is ours, and running it is the test
    printed = capsys.readouterr().out
    assert 4 == len(re.findall(r"^[\d.e-]+: done, validation loss \d", printed, flags=re.MULTILINE))
    assert printed.endswith("optimizer\nTrue\nTrue\n")
    assert names["losses"][-1] < names["losses"][0]
