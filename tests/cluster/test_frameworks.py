"""Scripts written for torchrun, with torch alone and with frameworks: they run unchanged here and over hosts, to the same bits."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from tests.scripts.launches import FOLDER, losses_by_torchrun, losses_in

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, pytest.mark.slow]
SCRIPTS = {
    "ddp": "torch",
    "fsdp2": "torch",
    "accelerated": "accelerate",
    "fabric": "lightning",
    "lightning_trainer": "lightning",
    "transformers_trainer": "transformers",
    "deepspeed_engine": "deepspeed",
}
"""For each script, the package that it needs; `benchmarks/frameworks.py` fetches the last two."""


@pytest.mark.timeout(1200)  # DeepSpeed compiles on each host, for minutes where many tests share two cores
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_losses_of_torchrun_here_and_over_two_hosts(
    cluster4,
    ttlaunch_on,
    lab,  # noqa: F811 - the fixture
    tmp_path,
    skip_or_fail,
    name,
):
    """E16."""
    if importlib.util.find_spec(SCRIPTS[name]) is None:
        skip_or_fail(f"{SCRIPTS[name]} is not installed")
    lab("node0 slots=1\nnode1 slots=1\n")
    shutil.copy(FOLDER / f"{name}.py", tmp_path)
    expected = losses_by_torchrun(f"{name}.py", tmp_path)
    assert expected.startswith("2 ")
    command = [sys.executable, "-m", "ttlaunch", "run", "-n", "2", f"{name}.py"]
    here = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (0, expected) == (here.returncode, losses_in(here.stdout)), here.stdout + here.stderr
    path = ["--env", "PYTHONPATH"] if "PYTHONPATH" in os.environ else []
    spread = ttlaunch_on(cluster4)(["run", "--on", "lab", "-n", "2", *path, f"{name}.py"], timeout_s=600)
    assert (0, expected) == (spread.status, losses_in(spread.stdout)), spread.stdout + spread.stderr
    wait_until(lambda: not leftovers(cluster4, hosts=["node0", "node1"]), what="nothing is left on the hosts")


def test_hosts_whose_python_has_no_torch_are_named_before_a_script_starts(cluster4, ttlaunch_on, lab, tmp_path):  # noqa: F811
    lab("node0 slots=1\nnode1 slots=1\n", python="/usr/bin/python3", mpi_prefix=sys.prefix)
    (tmp_path / "train.py").write_text("import torch\n")
    answer = ttlaunch_on(cluster4)("run --on lab -n 2 train.py", timeout_s=60)
    assert 4 == answer.status, answer.stdout + answer.stderr
    assert "error[H005]: 2 of 2 hosts have no torch" in answer.stderr
    assert not (tmp_path / "runs").exists()
    wait_until(lambda: not leftovers(cluster4, hosts=["node0", "node1"]), what="nothing is left on the hosts")
