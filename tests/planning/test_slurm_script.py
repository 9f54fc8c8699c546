"""The batch script of a submitted run is what sbatch and a shell read it for, and names no value that the user has set."""

import subprocess
from pathlib import Path

import pytest

from ttlaunch.planning.slurm_script import BatchScript, render_batch_script, render_variables

NASTY = 'it\'s $HOME `id` \\ "x" 50%\n#SBATCH --uid=0\n-n'


def script(**changes):
    options = ("--partition=debug", "--nodes=2")
    return BatchScript(
        **{
            "name": "data_parallel",
            "folder": Path("/home/u/runs/job-1"),
            "python": "/opt/venv/bin/python",
            "options": options,
            "grace_s": 30.0,
            "requeue": True,
        }
        | changes
    )


def test_the_whole_script(golden):
    golden("slurm/job.sbatch", render_batch_script(script()))


def test_the_signal_leaves_the_ranks_their_grace_and_the_run_time_to_save():
    assert "#SBATCH --signal=B:USR1@60\n" in render_batch_script(script())
    assert "#SBATCH --signal=B:USR1@121\n" in render_batch_script(script(grace_s=90.5))


def test_a_job_that_may_not_start_again_says_so():
    text = render_batch_script(script(requeue=False))
    assert "#SBATCH --no-requeue\n" in text
    assert "#SBATCH --requeue\n" not in text


def test_a_name_cannot_add_a_line_or_an_option():
    text = render_batch_script(script(name=f"a b\n#SBATCH --uid=0 {NASTY}"))
    assert "#SBATCH --job-name=ttlaunch-a-b-SBATCH---uid-0-it-s-HOME-id-x-50-SBA\n"[:40] in text
    assert render_batch_script(script()).count("#SBATCH ") == text.count("#SBATCH ")


@pytest.mark.parametrize("name", ["plain", "with space", "it's $HOME `id`", 'quote"', "-n", "ä%j\\"])
def test_the_script_starts_the_interpreter_in_the_folder_of_the_job(tmp_path, name):
    folder = tmp_path / name
    (folder / "code/package").mkdir(parents=True)
    (folder / "environment.sh").write_text(render_variables({"A": NASTY}))
    python = folder / "py thon"
    python.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$A" "$1" "$4"\n')
    python.chmod(0o755)
    text = render_batch_script(script(folder=folder, python=str(python)))
    answer = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=True, cwd="/")
    assert f"{folder}|{NASTY}|-P|{folder}/code/package|" == answer.stdout


def test_a_folder_that_the_host_does_not_see_ends_the_script_with_status_4(tmp_path):
    text = render_batch_script(script(folder=tmp_path / "elsewhere"))
    answer = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=False)
    assert 4 == answer.returncode
    assert "does not see the folder of this job" in answer.stderr


def test_variables_of_the_session_and_of_another_job_stay_behind():
    shell = {
        "SLURM_JOB_ID": "7",
        "SBATCH_PARTITION": "x",
        "SSH_AUTH_SOCK": "/s",
        "PWD": "/p",
        "XDG_RUNTIME_DIR": "/run/1",
    }
    odd = {"BASH_FUNC_f%%": "() { :; }", "1A": "x", "A;B": "x"}
    assert "export HF_TOKEN=s3cret\nexport PATH=/bin\n" == render_variables(
        shell | odd | {"PATH": "/bin", "HF_TOKEN": "s3cret"}
    )
