"""Where ranks listen for each other: as near as their hosts allow."""

import socket

import pytest
import torch

from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.comm.torch_group import _listen, _own_network, process_group


def test_ranks_of_one_host_listen_where_no_other_host_can_reach_them():
    listener, said = _listen(["here\n1\n", "here\n2\n"], [0, 1])
    with listener:
        assert ("127.0.0.1", listener.getsockname()[1]) == listener.getsockname()
        assert f"127.0.0.1\n{listener.getsockname()[1]}\none host" == said


def test_two_ranks_on_one_cuda_device_are_named_and_two_hosts_may_have_devices_of_one_name():
    """NCCL refuses the first after all have connected, and names no rank; a container may give devices on two hosts one name."""
    assert _listen(["a\n1\nGPU-7", "a\n2\nGPU-8", "a\n3\nGPU-7"], [4, 5, 6]) == (
        None,
        "\n\na CUDA device for each rank, and ranks 4 and 6 share one",
    )
    listener, _ = _listen(["a\n1\nGPU-7", "a\n2\nGPU-8"], [0, 1])
    listener.close()


def test_the_network_that_mpi_was_told_to_use_is_used(monkeypatch):
    monkeypatch.setenv("TTLAUNCH_NETWORKS", "198.51.100.0/24,127.0.0.0/8")
    assert ("lo", "127.0.0.1") == _own_network(is_one_host=False)


def test_a_host_without_an_address_in_that_network_says_so(monkeypatch):
    monkeypatch.setenv("TTLAUNCH_NETWORKS", "198.51.100.0/24")
    with pytest.raises(OSError, match=r"no interface of this host has an address in 198.51.100.0/24"):
        _own_network(is_one_host=False)


def test_without_a_network_an_address_that_others_can_reach_is_used(monkeypatch):
    monkeypatch.delenv("TTLAUNCH_NETWORKS", raising=False)
    names = {name for _, name in socket.if_nameindex()} - {"lo"}
    if not names:
        pytest.skip("this machine has no network")
    assert _own_network(is_one_host=False)[0] in names


def test_threads_of_one_process_are_refused_instead_of_waiting_for_each_other():
    world = InProcessWorld(["worker", "worker"])

    def life(rank):
        with process_group(world.communicator(rank), among=[0, 1], device=torch.device("cpu")):
            pytest.fail("the group was made")

    outcome = world.run({rank: lambda rank=rank: life(rank) for rank in (0, 1)})
    assert "needs a process for each rank" in str(next(iter(outcome.errors.values())))
