"""Completion of `--set` in the shell: keys of the recipe that is named, then the values of a key."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttlaunch.cli.main import main

START = "import sys; sys.argv[0] = 'ttlaunch'; from ttlaunch.cli.main import main; main()"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = sys.modules['mpi4py'] = None; " + START


def ask(environment):
    command = [sys.executable, "-c", WITHOUT_TORCH]
    answer = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    assert "" == answer.stderr
    return [line for line in answer.stdout.splitlines() if line]


def variables_of_bash(line):
    """What bash asks with for a line with the cursor at its end; it has split the words at `=`."""
    words = line.replace("=", " = ").rstrip(" ").split(" ") + ([""] if line.endswith(" ") else [])
    words = [word for number, word in enumerate(words) if word or number == len(words) - 1]
    return {"_TTLAUNCH_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": f"{len(words) - 1}"}


@pytest.fixture
def in_bash(here, monkeypatch, capsys):
    """`in_bash(line)`: what bash is told, by the command line in this process."""
    monkeypatch.setattr("sys.argv", ["ttlaunch"])
    monkeypatch.setattr("sys.excepthook", sys.excepthook)  # typer sets another one

    def completions(line):
        with monkeypatch.context() as asked:
            for name, value in variables_of_bash(line).items():
                asked.setenv(name, value)
            with pytest.raises(SystemExit):
                main()
        said = capsys.readouterr()
        assert "" == said.err
        return [line for line in said.out.splitlines() if line]

    return completions


def in_zsh(line):
    return ask({"_TTLAUNCH_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line})


def in_fish(line):
    action = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return ask({"_TTLAUNCH_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": line, **action})


RUN = "ttlaunch run data_parallel --set "
IN_BASH = {
    f"{RUN}training_config.prec": [f"training_config.precision={kind}" for kind in ("fp32", "bf16", "fp16")],
    f"{RUN}training_config.precision=": ["fp32", "bf16", "fp16"],
    f"{RUN}training_config.precision=b": ["bf16"],
    f"{RUN}training_config.steps=5 --set transformer_config.tie_embeddings=": ["true", "false"],
    f"{RUN}training_config.step": ["training_config.steps=", "training_config.steps=100"],
    f"{RUN}training_config.data_path=": [],
    f"{RUN}training_config.no_such_key=": [],
    f"{RUN}data_parallel_config.": ["data_parallel_config.reduction=canonical", "data_parallel_config.reduction=fast"],
    "ttlaunch run data_parallel --set=data_parallel_config.reduction=f": ["fast"],
    "ttlaunch validate local --recipe sync_ps --set sync_ps_config.straggler=": ["wait", "drop", "fail"],
    "ttlaunch run sync_ps --set sync_ps_config.polyak_i": [
        "sync_ps_config.polyak_interval=",
        "sync_ps_config.polyak_interval=null",
    ],
    "ttlaunch compare zero --set zero_config.": ["zero_config.stage=", "zero_config.stage=3"],
    "ttlaunch run zer": ["zero"],
    "ttlaunch run data_parallel --on=": ["2loudboxes", "5loudboxes", "local"],
}


@pytest.mark.parametrize("line", IN_BASH)
def test_bash_is_told_what_follows_the_last_equals_sign(in_bash, line):
    assert IN_BASH[line] == in_bash(line)


def test_keys_of_another_recipe_are_not_offered(in_bash):
    keys = in_bash("ttlaunch run data_parallel --set ")
    assert "training_config.steps=" in keys
    assert [] == [key for key in keys if key.startswith(("sync_ps_config", "zero_config"))]
    assert "multihost_config.pipeline_parallel_config.replicas=" not in keys  # which this recipe does not read


def test_without_a_recipe_the_shared_keys_are_offered(in_bash):
    assert "multihost_config.num_workers=" in in_bash("ttlaunch run --set multihost_config.")


def test_fish_and_zsh_are_told_whole_words_with_what_a_key_means(here):
    lines = in_fish(f"{RUN}training_config.precision=b")
    assert 1 == len(lines)
    assert lines[0].startswith("training_config.precision=bf16\tnumber format of matrix products")
    said = "\n".join(in_zsh(f"{RUN}training_config.precision=b"))
    assert said.startswith("""_arguments '*: :(("training_config.precision=bf16":"number format""")


def test_what_a_recipe_prints_is_no_completion(here):
    shutil.copytree(Path(__file__).parents[2] / "recipes/zero", here / "recipes/mine")
    recipe = here / "recipes/mine/recipe.py"
    recipe.write_text(f"print('hello')\n{recipe.read_text()}")
    assert ["zero_config.stage=", "zero_config.stage=3"] == ask(variables_of_bash("ttlaunch run mine --set zero_"))


def read_until(terminal, text, *, timeout_s=30):
    said, deadline = "", time.monotonic() + timeout_s
    while text not in said and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            said += os.read(terminal, 65536).decode()
    return said


def test_a_tab_in_a_real_bash_completes_a_key_and_its_value(here):
    (here / "ttlaunch").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{START}" "$@"\n')
    (here / "ttlaunch").chmod(0o755)
    environment = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "TERM": "dumb"}
    script = subprocess.run(
        [here / "ttlaunch"], env={**environment, "_TTLAUNCH_COMPLETE": "source_bash"}, capture_output=True, check=True
    )
    (here / "rc").write_bytes(script.stdout + b"\nPS1='$ '\n")  # after that of /etc/bash.bashrc
    ours, theirs = pty.openpty()
    command = ["bash", "--noprofile", "--rcfile", here / "rc", "-i"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    bash = subprocess.Popen(command, **streams, env=environment, cwd=here, start_new_session=True)
    try:
        read_until(ours, "$ ")
        os.write(ours, b"ttlaunch run data_parallel --set data_parallel_config.re\t")
        assert "duction=" in read_until(ours, "duction=")
        os.write(ours, b"f\t")
        assert "ast " in read_until(ours, "ast ")
    finally:
        bash.kill()
        bash.wait()
        os.close(ours)
        os.close(theirs)
