"""Scripts that set what torch reads while it is imported: their ranks are no forks of a process that has imported it."""

import json
import re

import pytest

SETS = {
    "one": "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n",
    "imported": "from os import environ\nenviron['MKL_NUM_THREADS'] = '2'\n",
    "in a function": "import os\ndef main():\n    os.environ.setdefault('TORCH_LOGS', '+dynamo')\n",
    "putenv": "import os\nos.putenv('PYTORCH_CUDA_ALLOC_CONF', 'x')\n",
    "several": "import os\nos.environ.update({'A': '1', 'CUDA_VISIBLE_DEVICES': '0'}, B='2')\n",
    "another name": "from os import environ as env\nenv['OMP_NUM_THREADS'] = '2'\n",
    "a second name": "import os\nenv = os.environ\nenv.setdefault('OMP_NUM_THREADS', '2')\n",
    "keywords": "import os\nos.environ.update(KMP_AFFINITY='none')\n",
    "merged": "import os\nos.environ |= {'TORCHINDUCTOR_CACHE_DIR': 'cache'}\n",
}
UNKNOWN = {
    "a variable": "import os\nfor name in ('A', 'B'):\n    os.environ[name] = '1'\n",
    "a mapping": "import os\nos.environ.update(dict(A=1))\n",
}
HARMLESS = {
    "another name": "import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\n",
    "read later": "import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\n",
    "only read": "import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ.get('CUDA_VISIBLE_DEVICES'))\n",
    "another mapping": "import os\nsettings = {}\nsettings['OMP_NUM_THREADS'] = 2\nsettings.update(OMP_NUM_THREADS=3)\n",
    "of another process": "import os\nenv = os.environ.copy()\nenv['OMP_NUM_THREADS'] = '1'\n",
    "a copy": "import os\nprint({**os.environ, 'OMP_NUM_THREADS': '1'})\n",
}


def planned(ttlaunch):
    """Whether ranks are to be forked, and what is said."""
    answers = [ttlaunch(f"plan --warm -n 2 {option} train.py") for option in ("--format json", "")]
    assert [0, 0] == [answer.status for answer in answers], answers[1].stderr
    return json.loads(answers[0].stdout).get("warm", False), answers[1].stderr


@pytest.mark.parametrize("case", [*SETS, *UNKNOWN])
def test_ranks_start_by_themselves_if_the_script_sets_what_an_import_of_torch_reads(here, ttlaunch, case):
    (here / "train.py").write_text({**SETS, **UNKNOWN}[case])
    is_warm, said = planned(ttlaunch)
    assert not is_warm
    what = "variables whose names are known only when it runs" if case in UNKNOWN else "[A-Z_]+, which torch may read"
    assert re.match(rf"warning\[P075\]: `--warm` has no effect: `train.py:\d` sets {what}", said)


@pytest.mark.parametrize("case", HARMLESS)
def test_other_scripts_are_run_by_forks(here, ttlaunch, case):
    (here / "train.py").write_text(HARMLESS[case])
    assert (True, "") == planned(ttlaunch)


def test_a_module_that_is_no_python_and_may_not_be_imported_does_not_count(here, ttlaunch):
    (here / "train.py").write_text("def later():\n    import broken\n")
    (here / "broken.py").write_text("import os (\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    assert (True, "") == planned(ttlaunch)


def test_a_module_beside_the_script_counts_and_is_named(here, ttlaunch):
    (here / "train.py").write_text("import settings\n")
    (here / "settings.py").write_text("import os\n\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    is_warm, said = planned(ttlaunch)
    assert not is_warm
    assert said.startswith("warning[P075]: `--warm` has no effect: `settings.py:3` sets OMP_NUM_THREADS")
    assert "hint: leave `--warm` out, or have one thread in each rank" in said
    (here / "settings.py").write_text("import os\nos.environ['TORCH_LOGS'] = '+dynamo'\n")
    assert "hint: set it with `--env NAME=VALUE` instead" in planned(ttlaunch)[1]


@pytest.mark.parametrize("line", ["-- python -m pack", "-- python -m pack.work", "-- python pack"])
def test_files_of_a_package_count_that_run_with_its_module(here, ttlaunch, line):
    (here / "pack").mkdir()
    (here / "pack/work.py").write_text("")
    (here / "pack/__main__.py").write_text(SETS["one"] if "." not in line else "")
    (here / "pack/__init__.py").write_text(SETS["one"] if "." in line else "")
    assert "warning[P075]: `--warm` has no effect: `pack/__" in ttlaunch(f"plan --warm -n 2 {line}").stderr


def test_the_example_of_the_page_is_warned_of_and_without_warm_nothing_is_said(here, ttlaunch):
    (here / "train.py").write_text(SETS["one"])
    assert "ttlaunch plan --warm -n 2 train.py\n" in ttlaunch("explain P075").stdout
    warned, silent = ttlaunch("plan --warm -n 2 train.py"), ttlaunch("plan -n 2 train.py")
    assert (0, True) == (warned.status, warned.stderr.startswith("warning[P075]: `--warm` has no effect"))
    assert (0, "") == (silent.status, silent.stderr)
