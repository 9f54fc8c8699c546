"""`mpirun` is the judge of what a hostfile means: it prints how it reads one without starting anything."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch.diagnostics import Source
from ttlaunch.spec.topology.hosts import parse_hosts

NODE = re.compile(r"^\s+(?P<name>\S+): slots=(?P<slots>\d+) max_slots=(?P<most>\d+)", re.MULTILINE)
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")

READ_ALIKE = {
    "two hosts": "a slots=2\nb slots=1\n",
    "bare lines add up": "a\na\na\n",
    "bare lines add up in any order": "a\nb\na\nb\n",
    "a bare line adds to slots": "a slots=3\na\na\n",
    "max_slots": "a slots=4 max_slots=8\n",
    "max-slots": "a slots=4 max-slots=8\n",
    "max_slots alone": "a max_slots=8\n",
    "login name": "joe@a slots=2\n",
    "address": "10.0.0.1 slots=3\n10.0.0.2 slots=3\n",
    "spaces around the equals sign": "a slots = 3\nb slots= 2\n",
    "comment after a word": "a slots=3 # three\nb slots=2#two\n",
    "comments and blank lines": "# c\n\n   a   slots=3   \n",
    "slashes are a comment": "// c\na slots=3 // three\n",
    "tabs": "\ta\tslots=3\n",
    "leading zeros": "a slots=03\n",
    "order of the file": "b slots=1\na slots=1\nc slots=1\n",
    "name that begins with a digit": "1host slots=3\n",
    "underscore": "a_b slots=3\n",
    "no line end": "a slots=3",
    "dash": "metal-wh-01 slots=1\nmetal-wh-04 slots=1\n",
}
REFUSED_BY_BOTH = {
    "unknown word": "a slots=1 foo=3\n",
    "misspelled": "a lots=1\n",
    "letter in the number": "a slots=1x\n",
    "slots twice": "a slots=1\na slots=2\n",
    "slots after a bare line": "a\na slots=2\n",
    "short names alike": "a.x slots=1\na.y slots=1\n",
    "max below slots": "a slots=4 max_slots=2\n",
}


def read_by_mpirun(text: str, folder: Path) -> list[tuple[str, int, int]]:
    if MPIRUN is None:
        pytest.skip("there is no mpirun on this machine")
    (folder / "hosts.txt").write_text(text)
    # As root mpirun wants two consents; without a pml it would probe the machine's networks.
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [MPIRUN, "--do-not-launch", "--display", "allocation", "--bind-to", "none"]
    command += ["--hostfile", "hosts.txt", "-n", "1", "hostname"]
    output = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    ).stdout
    first = output.split("ALLOCATED NODES")[1:2]
    return [(node["name"], int(node["slots"]), int(node["most"])) for text in first for node in NODE.finditer(text)]


@pytest.mark.mpi
@pytest.mark.parametrize("text", READ_ALIKE.values(), ids=READ_ALIKE.keys())
def test_a_hostfile_means_what_mpirun_says(text, tmp_path):
    hosts, diagnostics = parse_hosts(Source("hosts.txt", text))
    assert diagnostics == []
    assert read_by_mpirun(text, tmp_path) == [(host.name, host.slots, host.max_slots or 0) for host in hosts]


@pytest.mark.mpi
@pytest.mark.parametrize("text", REFUSED_BY_BOTH.values(), ids=REFUSED_BY_BOTH.keys())
def test_what_mpirun_refuses_is_refused(text, tmp_path):
    _, diagnostics = parse_hosts(Source("hosts.txt", text))
    assert len(diagnostics) == 1
    assert read_by_mpirun(text, tmp_path) == []
