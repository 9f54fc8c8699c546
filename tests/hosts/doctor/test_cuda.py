"""`device: cuda` is refused where a host surely has no CUDA device, and left to the rank where that is not known."""

from pathlib import Path

import pytest

from ttlaunch.hosts.doctor.cuda import Gpus, check_cuda, check_one_each, gpus_of_hosts
from ttlaunch.hosts.doctor.facts import Devices
from ttlaunch.spec.recipe.config import load_config
from ttlaunch.spec.recipe.declare import Layout, Recipe
from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe
from ttlaunch.spec.recipe.sections import TrainingFile

GPU = ("/dev/nvidia0",)


def config(device):
    recipe = Recipe("x", TrainingFile, [Layout("single", trainer=1)])
    return load_config(recipe, None, overrides=[f"device_config.device={device}"])


@pytest.mark.parametrize(
    ("device", "gpus"),
    [
        ("cuda", Gpus(GPU, "2.6.0+cu124")),
        ("cuda", Gpus(("/dev/kfd",), "2.6.0+rocm6.2")),
        ("cuda", Gpus(GPU, None)),
        ("auto", Gpus((), "2.6.0+cpu")),
        ("cpu", Gpus((), "2.6.0+cpu")),
    ],
)
def test_what_may_work_is_left_to_the_rank(topology, device, gpus):
    assert [] == check_cuda(config(device), {"metal-01": gpus}, topology=topology(1))


def test_hosts_that_cannot_work_are_named_each_with_its_reason(topology, check):
    hosts = {"metal-01": Gpus((), "2.6.0"), "metal-02": Gpus(GPU, "2.6.0"), "metal-03": Gpus(GPU, "2.6.0+cpu")}
    check(
        check_cuda(config("cuda"), hosts, topology=topology(3)),
        """\
        error[P044]: `device` is `cuda`, and torch can find no CUDA device on metal-01 and 1 more: there is no GPU in /dev
         --> --set:1:22
          |
        1 | device_config.device=cuda
          |                      ^^^^ needs one on every host
         --> hosts.txt:1:1
          |
        1 | metal-01 slots=1
          | -------- there is no GPU in /dev
         --> hosts.txt:3:1
          |
        3 | metal-03 slots=1
          | -------- torch 2.6.0+cpu was built without CUDA

        hint: `--set device_config.device=auto` computes on the CPU where there is no GPU
        """,
    )


def loaded_recipe(name, *overrides):
    recipe = load_recipe(find_recipe(name, working_folder=Path("/nowhere")))
    return load_config(recipe, None, overrides=overrides), recipe.needs_processes


def test_more_ranks_of_a_torch_group_than_devices_are_refused(check):
    loaded, needs = loaded_recipe("fully_sharded", "device_config.device=cuda")
    hosts = {"metal-01": Gpus(("/dev/nvidia-caps", "/dev/nvidia0", "/dev/nvidia1"), None)}
    check(
        check_one_each(loaded, hosts, ranks_on=["metal-01"] * 3, needs=needs),
        """\
        error[P076]: 3 ranks of metal-01 would share 2 CUDA devices: `multihost_config.enabled` uses NCCL, which needs one for each rank
         --> --set:1:22
          |
        1 | device_config.device=cuda
          |                      ^^^^ workers share torch's group

        hint: `-n 2` starts a rank for each device

        hint: other recipes share a device: `data_parallel`, `zero`
        """,
    )
    assert [] == check_one_each(loaded, hosts, ranks_on=["metal-01"] * 2, needs=needs)
    assert [] == check_one_each(loaded, {"metal-01": Gpus(("/dev/dxg",), None)}, ranks_on=["metal-01"] * 3, needs=needs)


@pytest.mark.parametrize(("reduction", "codes"), [("fast", ["P076"]), ("canonical", [])])
def test_only_what_uses_torch_groups_needs_a_device_for_each_rank(reduction, codes):
    sets = (f"data_parallel_config.reduction={reduction}", "device_config.device=cuda")
    loaded, needs = loaded_recipe("data_parallel", *sets)
    found = check_one_each(loaded, {"metal-01": Gpus(GPU, None)}, ranks_on=["metal-01"] * 2, needs=needs)
    assert codes == [one.code for one in found]


def test_a_host_that_did_not_say_what_it_has_is_not_judged(healthy):
    changed = {"devices": Devices(GPU, None, (), GPU)}
    facts = healthy(3, {1: {"devices": None}, 2: changed, 3: changed | {"python": None}})
    assert {"metal-02": Gpus(GPU, "2.6.0"), "metal-03": Gpus(GPU, None)} == gpus_of_hosts(facts)
