"""The tutorial about Python does what it says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/tutorials/sweep-from-python.md"


@pytest.mark.mpi
@pytest.mark.slow
def test_the_sweep_from_python_runs_as_it_stands(here, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert 4 == len(blocks)
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - the page is ours, and running it is the test
    printed = capsys.readouterr().out
    assert 4 == len(re.findall(r"^[\d.e-]+: done, validation loss \d", printed, flags=re.MULTILINE))
    assert printed.endswith("optimizer\nTrue\nTrue\n")
    assert names["losses"][-1] < names["losses"][0]
