"""`ttlaunch explain`: every code has a page, and the example on the page gives that code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch.diagnostics.explain import known_codes, load_page

PACKAGE = Path(__file__).parents[2] / "ttlaunch"
_LITERAL = re.compile(r'"([TCPHSR]\d{3})"')
_BLOCK = re.compile(r"^```(\S+)(?: ([^\n]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FLAGS = {"crlf", "bom", "utf-16", "missing"}
_NEEDS_MORE = {
    "H001": "a machine without mpirun",
    "H003": "an mpirun that is not Open MPI 4.1 or newer",
    "H004": "an mpi4py that is paired with another MPI",
    "H005": "a Python without the packages of a rank",
    "C088": "a Python without the package of the data",
    "P016": "hosts that are reached over SSH",
    "P071": "a plan that is made, since it is a warning; `tests/engines/test_choice.py` has it",
    "P075": "a plan that is made, since it is a warning; `tests/app/test_early_variables.py` has it",
    "P076": "a machine with a GPU; `tests/hosts/doctor/test_cuda.py` has it",
    "P073": "a cluster of Slurm, and is a warning; `tests/cluster/test_submit.py` has it",
    "P069": "a run that starts, since it is a warning; `tests/app/test_torchrun_options.py` has it",
    "P066": "a run that starts, since it is a warning; `tests/app/test_check_python.py` has it",
    "P051": "a run that starts, since it is a warning; `tests/security/test_recipes.py` has it",
    "P047": "a Python without the package of a sink; `tests/running/metrics` has it",
}
"""Pages whose example needs another machine; `test_bad_input.py` has each of these cases."""
_SUPERVISED = {"H008"}
"""Pages whose example is refused by the supervisor of a run, a process that writes to the streams of a real command."""
_FIRST_ABOUT_HOSTS = "H009"
"""From here on, pages tell of hosts that are reached over SSH; `tests/hosts/doctor` and `tests/cluster` have each case."""


def used_codes():
    """In the package, and in recipes, which have rules of their own."""
    sources = [*PACKAGE.rglob("*.py"), *(Path(__file__).parents[2] / "recipes").rglob("*.py")]
    return sorted({code for path in sources for code in _LITERAL.findall(path.read_text())})


def commands_of(code):
    """What the page's example types, in an empty folder."""
    return "".join(
        text for name, _, text in _BLOCK.findall(load_page(code).text) if name == "sh" and "ttlaunch" in text
    )


def recipe_of(code):
    """The recipe that the page's training file is for: the second word of the block's head."""
    words = [info for name, info, _ in _BLOCK.findall(load_page(code).text) if name == "train.yaml"]
    return next((word for word in words if word and word not in _FLAGS), "hierarchical_parallel")


def test_every_code_in_use_has_a_page_and_every_page_a_code_in_use():
    """`tests/diagnostics` looks at what is on the pages."""
    assert sorted(known_codes()) == used_codes()


@pytest.mark.parametrize("code", [code for code in known_codes() if code.startswith("C") and load_page(code).files])
def test_the_training_file_on_a_page_gives_its_code(ttlaunch, here, code):
    for file in load_page(code).files:
        if file.content is not None:
            (here / file.name).write_bytes(file.content)
    on = "--hostfile hosts.txt" if (here / "hosts.txt").exists() else ""
    answer = ttlaunch(f"plan {recipe_of(code)} -c train.yaml {on} --format concise --verbose")
    assert f"[{code}]: " in answer.stderr


def typed_codes():
    """Codes of pages whose example can be typed on any machine."""
    alone = [code for code in known_codes() if code[0] in "CP" or (code[0] == "H" and code < _FIRST_ABOUT_HOSTS)]
    return [code for code in alone if code not in _NEEDS_MORE and commands_of(code)]


@pytest.mark.parametrize("code", typed_codes())
def test_the_commands_on_a_page_give_its_code(here, ttlaunch, code):
    status, stderr = typed(commands_of(code).strip(), None if code in _SUPERVISED else ttlaunch)
    assert f"[{code}]: " in stderr
    assert status in {2, 3, 4}
    assert not (here / "runs").exists()


def typed(commands, ttlaunch):
    """The exit status of the last command, and what it writes to stderr.

    A shell runs what makes files; then each line that is only a command of ttlaunch runs in this process, if `ttlaunch` is given.
    """
    lines = commands.replace(" < /dev/null", "").splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("ttlaunch ")), len(lines))
    if ttlaunch is None or first == len(lines) or any(map(_needs_shell, lines[first:])):
        process = in_shell(commands)
        return process.returncode, process.stderr
    if first:
        assert 0 == in_shell("\n".join(lines[:first])).returncode
    answers = [ttlaunch(line.removeprefix("ttlaunch ")) for line in lines[first:]]
    return answers[-1].status, answers[-1].stderr


def _needs_shell(line):
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    return not line.startswith("ttlaunch ") or any(word[0] in "();<>|&" for word in words if word)


def in_shell(commands):
    return subprocess.run(
        ["sh", "-c", commands],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_page_is_found_in_any_letter_case(ttlaunch):
    assert ttlaunch("explain p003").stdout == ttlaunch("explain P003").stdout
    assert ttlaunch("explain P003").stdout.startswith("# P003: a world of the wrong size\n")


def test_all_codes_are_listed(ttlaunch):
    lines = ttlaunch("explain").stdout.splitlines()
    assert [line.partition("  ")[0] for line in lines] == known_codes()


def test_an_unknown_code_says_what_was_meant(ttlaunch):
    answer = ttlaunch("explain P0003")
    assert (answer.status, answer.stdout) == (2, "")
    expected = (
        "error[P009]: there is no code `P0003`\n\nhint: did you mean `P003`?\n\nhint: `ttlaunch explain` lists all\n\n"
    )
    assert answer.stderr == expected
