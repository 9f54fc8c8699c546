"""What Slurm's commands say when they cannot ask Slurm, put into diagnostics; the texts are those of Slurm 22.05."""

import pytest

from ttlaunch.app import slurm_allocation, submit
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.slurm_allocation import explain_slurm, warn_of_waiting
from ttlaunch.diagnostics import LaunchError, has_errors
from ttlaunch.spec.topology.slurm_request import SlurmRequest

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


class Listener(Unattended):
    """Keeps what was said of a wait."""

    def __init__(self):
        super().__init__()
        self.said = []

    def waiting(self, text):
        self.said.append(text)


@pytest.fixture
def slow_slurm(tmp_path, monkeypatch):
    """Commands of Slurm's that say nothing for a second, and then that munge does not answer."""
    for name in ("salloc", "sbatch", "srun"):
        (tmp_path / name).write_text(f"#!/bin/sh\nsleep 1\nprintf '%s\\n' '{NO_MUNGE.splitlines()[-1]}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    for module in (slurm_allocation, submit):
        monkeypatch.setattr(module, "SILENT_S", 0.1)
    return tmp_path


def test_a_slurm_that_does_not_answer_is_told_of_once_while_its_commands_try_again(slow_slurm):
    listener, allocation = Listener(), slurm_allocation._Salloc(SlurmRequest())
    with pytest.raises(LaunchError) as caught:
        allocation.wait(listener)
    with allocation._process as process:
        process.stdin.close()
    assert ["H044"] == [one.code for one in caught.value.diagnostics]
    assert [slurm_allocation.SILENT] == listener.said

    with pytest.raises(LaunchError) as caught:
        submit._sbatch(slow_slurm, SlurmRequest(), listener)
    assert ["H044"] == [one.code for one in caught.value.diagnostics]
    assert [slurm_allocation.SILENT] * 2 == listener.said


@pytest.fixture
def forgetful_slurm(tmp_path, monkeypatch):
    """Commands of Slurm's whose controller counts job 7 as waiting until it is cancelled, and does not answer at first."""
    show = "[ -e asked ] || { touch asked; exit 1; }; [ -e cancelled ] && s=CANCELLED || s=PENDING; echo JobId=7 JobState=$s Reason=None"
    for name, line in {"scontrol": show, "scancel": 'echo "$@" >>cancelled'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_job_that_the_controller_would_start_again_is_cancelled_as_soon_as_it_answers(forgetful_slurm):
    user = Unattended()
    slurm_allocation.end_job("7", user)
    assert ("7\n", []) == ((forgetful_slurm / "cancelled").read_text(), user.warnings)


def test_a_job_that_has_ended_is_not_cancelled(forgetful_slurm):
    (forgetful_slurm / "cancelled").touch()
    slurm_allocation.end_job("7", Unattended())
    assert "" == (forgetful_slurm / "cancelled").read_text()


def test_a_job_that_may_hold_hosts_is_named_with_the_command_that_gives_them_back(forgetful_slurm, monkeypatch):
    (forgetful_slurm / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(slurm_allocation, "_END_S", 0.3)
    user = Unattended()
    slurm_allocation.end_job("7", user)
    [warning] = user.warnings
    assert ("H045", False) == (warning.code, has_errors([warning]))
    assert (
        "Slurm's controller has not said within 0.3 s that job 7 has ended, which may still hold its hosts"
        == warning.message
    )
    assert warning.hints[0].startswith("`scancel 7` gives them back")
    assert not (forgetful_slurm / "cancelled").exists()
