"""Which buckets are complete during a backward pass, and for how long that is watched."""

import gc
import weakref

import torch
from torch import nn

from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.buckets import Bucket
from ttlaunch.runtime.parallel.gradients.watch import GradientWatch


def watched():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    return model, GradientWatch(FlatParameters(model.parameters()))


def test_a_bucket_is_told_when_its_parameters_have_their_gradients():
    model, watch = watched()
    last, first = Bucket(0, range(16, 32), range(1, 2)), Bucket(1, range(16), range(1))
    told = []
    watch.begin([last, first], lambda bucket: told.append((bucket.index, model[0].weight.grad.any().item())))
    model(torch.ones(1, 4)).sum().backward()
    assert [(0, False), (1, True)] == told


def test_a_model_that_nobody_has_any_more_leaves_memory_with_its_watch():
    model, watch = watched()
    parameters = [weakref.ref(one) for one in model.parameters()]
    watch.begin([Bucket(0, range(32), range(2))], lambda _: None)
    model(torch.ones(1, 4)).sum().backward()
    del model, watch
    gc.collect()
    assert [None, None] == [one() for one in parameters]
