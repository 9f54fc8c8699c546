"""The worker's end of a remote optimizer, over sockets inside this process."""

import threading

import pytest
import torch
from torch import nn

from ttlaunch.runtime.flat import FlatParameters
from ttlaunch.runtime.reduction import GradientTree
from ttlaunch.runtime.remote_optimizer import RemoteOptimizer


def serve(socket, workers, model, *, steps, rate):
    """Plain SGD on the mean over workers; each worker's block is one micro-batch."""
    flat = FlatParameters(model.parameters())
    tree = GradientTree(len(flat.weights_N))
    for rank in range(workers):
        socket.send(flat.weights_N, dest=rank)
    for _ in range(steps):
        for rank in range(workers):
            tree.receive(socket, source=rank, block=range(rank, rank + 1))
        tree.mean(flat.grads_N, micro_batches=workers)
        flat.weights_N.sub_(flat.grads_N, alpha=rate)
        for rank in range(workers):
            socket.send(flat.weights_N, dest=rank)


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def in_threads(*functions):
    failures = []

    def guarded(function):
        try:
            function()
        except Exception as error:  # noqa: BLE001  checked below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_the_loop_as_the_document_writes_it_trains(sockets):
    """A3, A4: workers that were seeded differently hold the optimizer's weights, and the loss falls."""
    ends = sockets(3)
    torch.manual_seed(0)
    x, y = torch.randn(32, 3), torch.randn(32, 1)
    server, replicas = make_model(0), [make_model(seed) for seed in (1, 2)]
    losses, first_weights = {0: [], 1: []}, {}

    def worker(rank):
        model, part = replicas[rank], slice(16 * rank, 16 * rank + 16)
        remote = RemoteOptimizer(model.parameters(), 2, ctx=ends[rank], block=range(rank, rank + 1))
        remote.receive_weights()
        first_weights[rank] = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(40):
            remote.zero_grad()
            loss = nn.functional.mse_loss(model(x[part]), y[part])
            loss.backward()
            remote.step()
            losses[rank].append(loss.item())

    in_threads(lambda: worker(0), lambda: worker(1), lambda: serve(ends[2], 2, server, steps=40, rate=0.3))
    for ours, theirs in zip(first_weights[0], first_weights[1], strict=True):
        assert torch.equal(ours, theirs)
    for replica in replicas:
        for ours, theirs in zip(replica.parameters(), server.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert losses[0][-1] + losses[1][-1] < 0.9 * (losses[0][0] + losses[1][0])

    alone = make_model(0)
    for _ in range(40):
        alone.zero_grad()
        (nn.functional.mse_loss(alone(x), y)).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.sub_(0.3 * parameter.grad)
    torch.testing.assert_close(list(alone.parameters()), list(server.parameters()), rtol=1e-4, atol=1e-5)


def test_a_parameter_without_a_gradient_counts_as_zero(sockets):
    """A14: the original hangs."""
    worker_end, server_end = sockets(2)
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    server = make_same(model)
    remote = RemoteOptimizer(model.parameters(), 1, ctx=worker_end)

    def worker():
        remote.receive_weights()
        for parameter in model.parameters():
            parameter.grad = None
        model[0](torch.ones(1, 2)).sum().backward()
        remote.step()

    before = server[1].weight.detach().clone()
    in_threads(worker, lambda: serve(server_end, 1, server, steps=1, rate=1.0))
    assert torch.equal(before, model[1].weight)
    assert torch.equal(server[0].weight, model[0].weight)


def make_same(model):
    twin = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    twin.load_state_dict(model.state_dict())
    return twin


def test_it_keeps_no_optimizer_state(sockets):
    """A8: weights, gradients and, after a step, one gradient sum; nothing like Adam's moments."""
    (end,) = sockets(1)
    remote = RemoteOptimizer(make_model(0).parameters(), 0, ctx=end)
    tensors = [value for value in vars(remote).values() if isinstance(value, torch.Tensor)]
    assert tensors == []
    assert {"_flat", "_aggregator", "_socket", "_block", "_sums", "_accumulated"} == set(vars(remote))


def test_a_step_moves_the_gradients_once(sockets):
    """A9, A12: k micro-batches, one message."""
    worker_end, server_end = sockets(2)
    model = make_model(0)
    remote = RemoteOptimizer(model.parameters(), 1, ctx=worker_end, block=range(4, 8))
    weights_N = FlatParameters(model.parameters()).weights_N
    server_end.send(weights_N, dest=0)
    for index in range(4, 8):
        model(torch.ones(2, 3)).sum().backward()
        remote.accumulate(index, tokens=2, loss=1.0)
    remote.step()
    assert [(1, 64 + 4 * len(weights_N))] == worker_end.sent


def test_half_a_block_is_refused(sockets):
    (end,) = sockets(1)
    remote = RemoteOptimizer(make_model(0).parameters(), 0, ctx=end, block=range(2))
    remote.accumulate(0, tokens=1, loss=0.0)
    with pytest.raises(ValueError, match="1 micro-batches were accumulated, the block has 2"):
        remote.step()


def test_an_already_flat_model_stays_where_it_is():
    model = make_model(0)
    first = FlatParameters(model.parameters())
    second = FlatParameters(model.parameters())
    assert first.weights_N.data_ptr() == second.weights_N.data_ptr()
    assert first.grads_N.data_ptr() == second.grads_N.data_ptr()
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
