"""What Slurm's commands say when they cannot ask Slurm, put into diagnostics; the texts are those of Slurm 22.05."""

import pytest

from ttlaunch.app.slurm_allocation import explain_slurm, warn_of_waiting
from ttlaunch.diagnostics import has_errors

NO_CONFIGURATION = """\
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""
RETRIES = (
    "salloc: error: s_p_parse_file: cannot stat file /nowhere: No such file or directory, retrying in 1sec up to 60sec"
)
NO_MUNGE = 'srun: error: If munged is up, restart with --num-threads=10\nsrun: error: Munge encode failed: Failed to access "/run/munge": No such file'
NO_CONTROLLER = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    ("text", "code"),
    [(NO_CONFIGURATION, "H049"), (RETRIES, "H049"), (NO_MUNGE, "H044"), (NO_CONTROLLER, "H045")],
)
def test_what_keeps_slurms_commands_from_asking_is_named_with_their_words_on_one_line(text, code):
    found = explain_slurm(text)
    assert code == found.code
    assert text.splitlines()[-1][:40] in found.notes[0]
    assert "\\n" not in found.notes[0]


def test_a_refusal_of_slurm_itself_is_left_to_the_caller():
    assert explain_slurm("sbatch: error: invalid partition specified: gqu") is None


def test_only_reasons_that_somebody_has_to_remove_are_warned_of():
    [warning] = warn_of_waiting("7", "PartitionDown")
    assert ("H046", False) == (warning.code, has_errors([warning]))
    assert [] == [one for reason in ("", "Priority", "Resources") for one in warn_of_waiting("7", reason)]
