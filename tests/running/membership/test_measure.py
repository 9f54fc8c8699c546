"""What decides the bits on this machine: equal for equal machines, and another value for every difference that counts."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.running.membership.fingerprints import differences
from ttlaunch.running.membership.measure import MeasureError, hash_code, hash_config, measure_fingerprint

GRPC = "multihost_config.socket_type=grpc"


@pytest.fixture(scope="module")
def plan():
    return prepare(RunSpec("data_parallel", ranks=2, engine="agents", overrides=(GRPC,)), Unattended()).plan


@pytest.fixture(scope="module")
def here(plan):
    return measure_fingerprint(plan)


def test_this_machine_has_the_fingerprint_that_its_torch_reports(plan, here):
    torch = pytest.importorskip("torch")
    assert here.torch.startswith(torch.__version__)
    assert here.cpu_capability == torch.backends.cpu.get_cpu_capability()
    assert here.threads == plan.program.config["device_config"]["threads_per_rank"]
    assert here.device == "cpu"
    assert here.corpus == plan.program.data["sha256"]


def test_an_instruction_set_that_the_run_forbids_itself_is_part_of_the_fingerprint(plan, here):
    other = measure_fingerprint(replace(plan, environment={**plan.environment, "ATEN_CPU_CAPABILITY": "default"}))
    assert [one.field for one in differences(here, other)] == ["cpu_capability"]


def test_an_interpreter_without_torch_is_named(plan, tmp_path):
    with pytest.raises(MeasureError, match="cannot be started: no such file"):
        measure_fingerprint(replace(plan, rank_command=(str(tmp_path / "python"), "-m", "x")))
    empty = tmp_path / "torch.py"
    empty.write_text("raise ImportError('libcudart.so.12 is missing')\n")
    with pytest.raises(MeasureError, match=r"torch cannot be asked: ImportError: libcudart\.so\.12 is missing"):
        measure_fingerprint(replace(plan, environment={"PYTHONPATH": str(tmp_path)}))


def test_code_that_is_equal_has_one_hash_wherever_it_lies(plan, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(plan.program.folder, copy)
    (copy / "notes.md").write_text("no code")
    (copy / "__pycache__").mkdir(exist_ok=True)
    (copy / "__pycache__" / "left.py").write_text("x = 1")
    assert hash_code(copy) == hash_code(Path(plan.program.folder))
    (copy / "trainer.py").write_bytes((copy / "trainer.py").read_bytes() + b"\n")
    assert hash_code(copy) != hash_code(Path(plan.program.folder))


def test_a_wheel_and_a_checkout_have_one_hash(tmp_path):
    for folder in ("ttlaunch", "ttlaunch/_recipes/mine", "other/_recipes"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 1")
    without = hash_code(tmp_path / "ttlaunch", without=("_recipes",))
    shutil.rmtree(tmp_path / "ttlaunch" / "_recipes")
    assert hash_code(tmp_path / "ttlaunch") == without
    assert hash_code(tmp_path / "other") != hash_code(tmp_path / "other", without=("_recipes",))


def test_a_file_name_that_is_no_text_has_a_hash(tmp_path):
    name = os.fsdecode(b"\xff.py")
    (tmp_path / name).write_text("x = 1")
    assert len(hash_code(tmp_path)) == 64


def test_only_the_path_of_the_text_may_differ(plan):
    config = plan.program.config
    elsewhere = {**config, "training_config": {**config["training_config"], "data_path": "/elsewhere.txt"}}
    shorter = {**config, "training_config": {**config["training_config"], "steps": 3}}
    assert hash_config(elsewhere) == hash_config(config)
    assert hash_config(shorter) != hash_config(config)


def test_the_interpreter_is_that_of_the_ranks(plan):
    assert plan.rank_command[0] == sys.executable
