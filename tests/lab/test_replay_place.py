"""A debugger is promised only on a line that a step can run."""

import pytest

from ttlaunch.diagnostics import LaunchError
from ttlaunch.lab.replay_place import _check_line


def test_a_debugger_is_not_promised_on_a_line_that_no_step_runs(tmp_path):
    path = tmp_path / "trainer.py"
    path.write_text('"""A recipe."""\n\nLIMIT = 3\n\n\ndef step(ctx):\n    # of one step\n    return ctx\n')
    for line, words in ((1, "trainer.py:8"), (3, "trainer.py:8"), (6, "trainer.py:8"), (7, "trainer.py:8"), (9, "8")):
        with pytest.raises(LaunchError, match=words) as found:
            _check_line(path, line, "trainer.py")
        assert 2 == found.value.exit_status
    _check_line(path, 8, "trainer.py")
