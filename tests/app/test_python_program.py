"""Which command lines start a Python program, and which of these name MPI."""

import json

import pytest

from ttlaunch.app.python_program import look_at_python

MPI, NO_MPI = True, False
FILES = {
    "plain.py": "import os, torch\n",
    "named.py": "from mpi4py import MPI\n",
    "by_library.py": "import ctypes\nctypes.CDLL('libmpi.so.40')\n",
    "by_name.py": "import importlib\nimportlib.import_module('mpi4py.MPI')\n",
    "backend.py": "import torch.distributed as dist\ndist.init_process_group('mpi')\n",
    "over.py": "import models\n",
    "models.py": "from layers import conv\n",
    "layers/__init__.py": "",
    "layers/conv.py": "from . import halo\n",
    "layers/halo.py": "import mpi4py\n",
    "circle.py": "import circle\n",
    "of_python_2.py": "print 1\n",
    "pack/__init__.py": "",
    "pack/__main__.py": "from pack.work import main\n",
    "pack/work.py": "main = None\n",
    "ring/__init__.py": "",
    "ring/__main__.py": "import mpi4py\n",
    "ring/work.py": "import talk\n",
    "ring/talk.py": "import mpi4py\n",
    "first/__init__.py": "import mpi4py\n",
    "first/work.py": "",
    "talk.py": "",
}
COMMANDS = {
    "python plain.py --lr 1": NO_MPI,
    "python3.11 -u -X dev plain.py": NO_MPI,
    "/usr/bin/python3 plain.py": NO_MPI,
    "./plain.py": NO_MPI,
    "python named.py": MPI,
    "python by_library.py": MPI,
    "python by_name.py": MPI,
    "python backend.py": MPI,
    "python over.py": MPI,
    "python circle.py": NO_MPI,
    "python of_python_2.py": NO_MPI,
    "python absent.py": MPI,
    "python -m pack": NO_MPI,
    "python -m pack.work": NO_MPI,
    "python -m ring": MPI,
    "python ring": MPI,
    "python ring/work.py": MPI,
    "python -m ring.work": NO_MPI,  # it imports the module of the working folder
    "python -m first.work": MPI,
    "python pack": NO_MPI,
    "python -m mpi4py plain.py": MPI,
    "python -m pdb named.py": MPI,
    "python -c pass": NO_MPI,
    "python -c mpi4py": MPI,
    "python": None,
    "python -V": None,
    "hostname": None,
    "bash plain.sh": None,
    "pythonista plain.py": None,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_python_program_is_recognised_and_whether_it_names_mpi(here, command):
    for name, text in FILES.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    found = look_at_python(command.split(), here)
    assert COMMANDS[command] == (found and found.uses_mpi)


def test_a_link_to_a_script_starts_by_its_own_name_and_imports_from_beside_the_file_to_which_it_leads(here, ttlaunch):
    (here / "real").mkdir()
    (here / "real" / "work.py").write_text("import talk\n")
    (here / "real" / "talk.py").write_text("import mpi4py\n")
    (here / "train.py").symlink_to("real/work.py")
    answer = ttlaunch("plan --format json train.py")
    assert str(here / "train.py") == json.loads(answer.stdout)["rank_command"][-1]
    assert "`talk.py` names mpi4py" in ttlaunch("plan train.py").stdout


def test_only_ranks_of_python_programs_get_the_variables_of_torchrun(here, ttlaunch):
    (here / "work.py").write_text("")
    (here / "talk.py").write_text("import mpi4py\n")
    note = "ranks get the variables that torchrun sets, such as RANK and MASTER_ADDR"
    silent = "; the program does not name MPI and runs without it"
    assert f"note  {note}{silent}\n" in ttlaunch("plan work.py").stdout
    assert f"note  {note}; `talk.py` names mpi4py, so it gets MPI\n" in ttlaunch("plan talk.py").stdout
    assert note not in ttlaunch("plan -- hostname").stdout
    assert '"python"' not in ttlaunch("plan --format json -- hostname").stdout
