"""`device: cuda` is refused where a host surely has no CUDA device, and left to the rank where that is not known."""

import pytest

from ttlaunch.hosts.doctor.cuda import Gpus, check_cuda, gpus_of_hosts
from ttlaunch.hosts.doctor.facts import Devices
from ttlaunch.spec.recipe.config import load_config
from ttlaunch.spec.recipe.declare import Layout, Recipe
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


def test_a_host_that_did_not_say_what_it_has_is_not_judged(healthy):
    changed = {"devices": Devices(GPU, None, (), GPU)}
    facts = healthy(3, {1: {"devices": None}, 2: changed, 3: changed | {"python": None}})
    assert {"metal-02": Gpus(GPU, "2.6.0"), "metal-03": Gpus(GPU, None)} == gpus_of_hosts(facts)
