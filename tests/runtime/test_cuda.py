"""What holds on a GPU: the same bits each time and on any number of ranks that share it, and the bits of training where a model is served."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.runtime.serving.served_models import (
    cached_logits,
    configuration,
    differing,
    random_model,
    random_texts,
    whole_part,
)
from ttlaunch.recipe import TrainingFile
from ttlaunch.runtime.entry import choose_device
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.serving.probe import probe, probe_whole
from ttlaunch.runtime.serving.products import Products
from ttlaunch.runtime.training.passes import differentiate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
STEPS = "--set device_config.device=cuda --set training_config.steps=12 --set training_config.validation_interval=12"


@pytest.fixture
def device():
    yield choose_device(TrainingFile.model_validate({"device_config": {"device": "cuda"}}).device_config, local_rank=0)
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_gradient_of_long_texts_has_the_same_bits_each_time(device, precision, kind):
    """The backward pass of attention over 1,024 tokens adds with atomics unless it is told not to: five gradients, five results."""
    cfg = configuration(length=1024, width=256, heads=4, model_type=kind, precision=precision)
    model = Model(cfg, vocabulary=512, blocks=range(2), has_embedding=True, has_head=True)
    model.flatten(device)
    x_BT, y_BT = torch.randint(512, (2, 4, 1024), generator=torch.Generator().manual_seed(3)).to(device)
    found = set()
    for _ in range(4):
        model.zero_grad()
        differentiate(model, x_BT, y_BT, masks=model.masks(1, 0))
        found.add(model.take_gradients().cpu().numpy().tobytes())
    assert 1 == len(found)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", [{}, {"model_type": "llama", "num_kv_heads": 2}, {"model_type": "mlp"}], ids=str)
def test_cached_rows_have_the_bits_of_training(device, precision, kind):
    cfg = configuration(length=256, width=128, heads=4, precision=precision, **kind)
    model, texts = random_model(cfg), random_texts(cfg, count=4)
    model.flatten(device)
    expected = model(torch.tensor(texts, device=device)).detach().float().cpu()
    products = Products(cfg, model, training_rows=4 * 256)
    part = whole_part(cfg, model, products=products)
    said = probe(cfg, model, products) or probe_whole(cfg, model, part, training_rows=4 * 256)
    found = cached_logits(part, texts, chunks=(1, 3, 40), starts=(1, 100, 200, 7))
    assert bool(said) == bool(differing(found, expected)), said
    assert precision != "fp32" or not said


def test_fewer_rows_than_were_tried_have_other_bits(device):
    """Without the padding, so that the test above can fail."""
    cfg = configuration(length=256, width=128, heads=4)
    model, texts = random_model(cfg), random_texts(cfg, count=4)
    model.flatten(device)
    expected = model(torch.tensor(texts, device=device)).detach().float().cpu()
    products = Products(cfg, model, training_rows=4 * 256)
    products._counts = (1, 2, 4, 8, *products._counts)
    assert 0 < differing(
        cached_logits(whole_part(cfg, model, products=products), texts, chunks=(1, 3), starts=(1, 5, 40, 7)), expected
    )


@pytest.mark.mpi
def test_ranks_that_share_a_device_end_with_the_bits_of_one(ttlaunch):
    found = {}
    for recipe, ranks in (("data_parallel", 1), ("data_parallel", 2), ("hierarchical_parallel", 4), ("zero", 2)):
        answer = ttlaunch(f"run {recipe} -n {ranks} {STEPS} --format json")
        assert 0 == answer.status, answer.stderr
        found[recipe, ranks] = json.loads(answer.stdout)["parameters_sha256"]
    assert 1 == len(set(found.values())), found


@pytest.mark.mpi
def test_want_of_memory_is_named_without_the_memory_of_the_host(ttlaunch):
    sizes = "--set training_config.micro_batch_size=65536 --set training_config.batch_size=65536"
    answer = ttlaunch(f"run data_parallel -n 1 {STEPS} {sizes} --set transformer_config.max_sequence_length=256")
    assert 1 == answer.status
    assert "error[R024]: rank 0 (trainer, localhost) ran out of memory in step 1" in answer.stderr
    assert "CUDA out of memory" in answer.stderr
    assert "it held" not in answer.stderr


@pytest.mark.mpi
def test_nothing_stays_on_the_device(ttlaunch, here):
    assert 0 == ttlaunch(f"run data_parallel -n 2 {STEPS}").status
    until = time.monotonic() + 10
    while (left := _ranks_on_device(here)) and time.monotonic() < until:
        time.sleep(0.2)
    assert [] == left


def _ranks_on_device(folder):
    """Processes on the device that were started in this folder: other tests may use the device, too."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    pids = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return [pid for pid in pids if pid != str(os.getpid()) and _folder_of(pid) == folder]


def _folder_of(pid):
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None  # it has just ended
