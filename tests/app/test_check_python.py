"""Scripts that cannot run, or that do the launcher's work, are named before anything starts."""

import sys

import pytest

SPAWN = "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n"
LOCAL_RANK = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n"
CASES = {
    "never closed": ("print(1\n", "error[P065]: train.py is not Python", "train.py:1:6", "'(' was never closed"),
    "binary": ("\0\1", "error[P065]: train.py is not Python", "train.py:1:1", "null bytes"),
    "an interpreter without it": ("import deepspeed\n", "error[H005]: ranks need deepspeed", "train.py:1:1", "imports"),
    "spawn": (SPAWN, "warning[P066]: train.py starts ranks itself with `spawn`", "train.py:2:1", "-n 1"),
    "local rank": (LOCAL_RANK, "warning[P066]: train.py reads `--local_rank`", "train.py:3:21", "LOCAL_RANK"),
    "slurm": ("import os\nos.environ['SLURM_PROCID']\n", "warning[P066]: train.py looks", "train.py:2:12", "srun"),
    "port": (
        "import os\nos.environ['MASTER_PORT'] = '1'\n",
        "warning[P066]: train.py sets",
        "train.py:2:29",
        "setdefault",
    ),
}
SILENT = {
    "spawn beside ranks of a launcher": SPAWN + "import os\nos.environ.get('WORLD_SIZE')\n",
    "local rank with the variable": LOCAL_RANK + "import os\nos.environ.get('LOCAL_RANK')\n",
    "a default port": "import os\nos.environ.setdefault('MASTER_PORT', '29500')\n",
    "another spawn": "import pexpect\npexpect.spawn('ls')\n",
    "a framework that may be missing": "try:\n    import deepspeed\nexcept ImportError:\n    pass\n",
    "a path of its own": "import sys\nsys.path.append('src')\nimport deepspeed\n",
    "a warning of the parser": "print('\\d')\n",
}


@pytest.fixture
def without_deepspeed(monkeypatch):
    find = __import__("importlib.util").util.find_spec
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else find(name))


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_in_a_script_is_named_with_its_line(here, ttlaunch, without_deepspeed, case):
    """E19."""
    text, *expected = CASES[case]
    (here / "train.py").write_text(text)
    answer = ttlaunch("plan -n 2 train.py")
    assert [] == [words for words in expected if words not in answer.stderr], answer.stderr
    is_error = expected[0].startswith("error")
    assert (answer.status == 0) is not is_error
    assert not (here / "runs").exists()


@pytest.mark.parametrize("case", SILENT)
def test_a_script_that_may_be_right_is_not_mentioned(here, ttlaunch, without_deepspeed, case):
    (here / "train.py").write_text(SILENT[case])
    assert "" == ttlaunch("plan -n 2 train.py").stderr


def test_a_module_beside_the_script_that_is_no_python_is_named_if_it_is_imported_in_any_case(here, ttlaunch):
    (here / "parts").mkdir()
    (here / "parts/__init__.py").write_text("from . import model\n")
    (here / "parts/model.py").write_text("import broken\n")
    (here / "broken.py").write_text("layers = 2\ndef build(:\n")
    (here / "train.py").write_text("import os\nfrom parts import model\n")
    answer = ttlaunch("plan train.py")
    assert (2, True) == (answer.status, answer.stderr.startswith("error[P065]: broken.py is not Python ")), (
        answer.stderr
    )
    assert "broken.py:2:11" in answer.stderr


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import broken\nexcept SyntaxError:\n    pass\n",
        "def later():\n    import broken\n",
        "import sys\nsys.path.insert(0, 'elsewhere')\nimport broken\n",
        "import json\n",
    ],
    ids=["tried", "later", "another path", "of Python itself"],
)
def test_a_broken_module_that_may_not_be_imported_is_not_mentioned(here, ttlaunch, text):
    for name in ("broken.py", "json.py"):
        (here / name).write_text("def build(:\n")
    (here / "train.py").write_text(text)
    assert "" == ttlaunch("plan train.py").stderr


def test_a_module_is_looked_for_where_the_program_looks(here, ttlaunch):
    """Beside a script and in a folder that is run, but in the working folder if the program is a module itself."""
    (here / "pack").mkdir()
    for name in ("__init__", "__main__", "work"):
        (here / f"pack/{name}.py").write_text("import helper\n" if name != "__init__" else "")
    (here / "pack/helper.py").write_text("def build(:\n")
    (here / "helper.py").write_text("")
    broken = ["plan -- python pack/work.py", "plan -- python pack"]
    assert [2, 2] == [ttlaunch(line).status for line in broken]
    assert [0, 0] == [ttlaunch(line).status for line in ("plan -- python -m pack.work", "plan -- python -m pack")]


@pytest.mark.parametrize("text", [SPAWN, LOCAL_RANK])
def test_a_single_rank_may_do_the_launchers_work(here, ttlaunch, text):
    (here / "train.py").write_text(text)
    assert "" == ttlaunch("plan -n 1 train.py").stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("notes.ipynb", "error[P065]: notes.ipynb is a notebook and no Python script"),
        ("-- python notes.ipynb", "error[P065]: notes.ipynb is a notebook and no Python script"),
        ("-- python absent.py", "error[P065]: the script absent.py cannot be read: no such file or directory"),
        ("-- python -m absent.work", "error[P009]: there is no module `absent.work` for python"),
        ("-- python -m own.absent", "error[P009]: there is no module `own.absent` for python"),
        ("folder.py", "error[P009]: folder.py is a folder and no script"),
        ("-- python folder.py", "error[P065]: the script folder.py cannot be read: "),
    ],
)
def test_what_is_no_script_is_refused_before_the_start(here, ttlaunch, monkeypatch, line, message):
    monkeypatch.setenv("PATH", sys.prefix + "/bin:/usr/bin:/bin")
    (here / "notes.ipynb").write_text("{}")
    (here / "folder.py").mkdir()
    (here / "own").mkdir()
    (here / "own/__init__.py").write_text("")
    answer = ttlaunch(f"run -n 2 {line}")
    assert (2, True) == (answer.status, answer.stderr.startswith(message)), answer.stderr
    assert not (here / "runs").exists()


def test_the_interpreter_of_the_ranks_decides_what_is_python(here, ttlaunch):
    (here / "train.py").write_text("print 'of another Python'\n")
    newer = here / "python9"
    newer.write_text("#!/bin/sh\nexit 0\n")
    newer.chmod(0o755)
    assert 0 == ttlaunch("plan -- ./python9 train.py").status
    newer.write_text("#!/bin/sh\nexit 1\n")
    assert 2 == ttlaunch("plan -- ./python9 train.py").status


def test_an_interpreter_without_torch_is_named(here, ttlaunch):
    (here / "train.py").write_text("import torch\n")
    (here / "bare").mkdir()
    bare = here / "bare/python3"
    bare.write_text("#!/bin/sh\necho torch\n")
    bare.chmod(0o755)
    answer = ttlaunch("run -n 2 -- ./bare/python3 train.py")
    assert 4 == answer.status
    assert answer.stderr.startswith(
        "error[H005]: ranks need torch, not installed for ./bare/python3; nothing was started"
    )


def test_packages_are_not_checked_where_the_ranks_get_a_path_of_their_own(here, ttlaunch, without_deepspeed):
    (here / "train.py").write_text("import deepspeed\n")
    assert 4 == ttlaunch("plan -n 2 train.py").status
    assert 0 == ttlaunch("plan -n 2 --env PYTHONPATH=/opt/checkout train.py").status
