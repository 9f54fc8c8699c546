"""Checkpoints as ranks see them: their bytes, their names, their errors, and that any layout reads any other's."""

import hashlib
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ttlaunch import contract
from ttlaunch.recipe import CheckpointConfig
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import Checkpoint, verify
from ttlaunch.runtime.checkpoint.checkpoints import Checkpoints
from ttlaunch.runtime.checkpoint.image import ShardImage
from ttlaunch.runtime.checkpoint.reader import CheckpointReadError, read_tensors
from ttlaunch.runtime.checkpoint.writer import CheckpointWriteError, write_durably
from ttlaunch.runtime.comm.in_process import InProcessWorld
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.dropout import seeded_generator
from ttlaunch.runtime.model.flat import digest
from ttlaunch.runtime.telemetry.records import ProgressWriter
from ttlaunch.runtime.training.optimizers import build_optimizer
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.runtime.world import Rank, World

PLAN = {"hash": "h", "recipe": {"name": "r"}, "layout": "l", "world_size": 64, "config": {}, "data": None}
STATE = {"data": {"epoch": 0, "sample": 24}, "loss_scaler": None}
# The ranks that own something, and which of the model's four blocks each of them has.
LAYOUTS = {
    "single": {0: [4]},
    "two tiers": {2: [4]},
    "three tiers": {3: [4]},
    "two stages": {0: [2, 2], 1: [2, 2]},
    "three stages": {0: [1, 2, 1], 1: [1, 2, 1], 2: [1, 2, 1]},
    "four stages": {rank: [1, 1, 1, 1] for rank in range(4)},
}


@pytest.fixture
def make_part(make_cfg, make_context):
    """`make_part(blocks, stage, seed=…)`: the model and optimizer of one stage, all tensors drawn from seed and name."""

    def make(blocks, stage, *, seed=None, optimizer="adamw"):
        cfg = make_cfg(transformer={"num_blocks": 4}, training={"optimizer": optimizer})
        model = build_model(cfg, make_context(cfg), stage=stage, blocks_per_stage=blocks)
        update = build_optimizer(cfg, model, total_steps=10)
        for name, tensor in tensors_of(model, update).items():
            if seed is None:
                tensor.fill_(float("nan"))
            else:
                tensor.copy_(torch.rand(tensor.shape, generator=seeded_generator(seed, name)))
        return model, update

    return make


def tensors_of(model, optimizer):
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | dict(optimizer.named_state())


def digests_of(parts):
    return {name: digest(name, tensor) for part in parts for name, tensor in tensors_of(*part).items()}


@pytest.fixture
def make_checkpoints(tmp_path):
    """`make_checkpoints(rank, …)`: those of a rank whose run folder is the test's."""
    lost = []

    def make(rank, *, start=None, **config):
        cfg = CheckpointConfig.model_validate({"interval": 10} | config)
        return Checkpoints(cfg, run_dir=tmp_path, rank=rank, start=start, lose=lambda *loss: lost.append(loss))

    make.lost = lost
    return make


@pytest.fixture
def save(tmp_path, make_checkpoints):
    """`save(parts by rank)` writes a checkpoint of step 10 and returns what a plan says of it."""

    def make(parts):
        for rank, (model, optimizer) in parts.items():
            checkpoints = make_checkpoints(rank)
            checkpoints.save(10, model, optimizer, owners=list(parts), state=STATE)
            checkpoints.finish()
        assert [10] == complete_checkpoints(tmp_path, PLAN, run_id="run")
        found = verify(tmp_path / contract.checkpoint_dir(10))
        assert isinstance(found, Checkpoint), found
        files = [{"path": str(found.path / name)} | entry for name, entry in found.manifest["files"].items()]
        return {"step": 10, "state": found.manifest["state"], "files": files}

    return make


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_any_layout_reads_the_checkpoint_of_any_other(make_part, make_checkpoints, save, before, after):
    written = {
        rank: make_part(blocks, rank if len(blocks) > 1 else 0, seed=1) for rank, blocks in LAYOUTS[before].items()
    }
    start = save(written)
    parts = []
    for rank, blocks in LAYOUTS[after].items():
        model, optimizer = make_part(blocks, rank if len(blocks) > 1 else 0)
        make_checkpoints(rank, start=start).restore(model, optimizer, state=STATE)
        parts.append((model, optimizer))
    assert digests_of(written.values()) == digests_of(parts)


def test_the_momentum_of_sgd_is_kept(make_part, make_checkpoints, save):
    """D23: optimizer state."""
    model, optimizer = make_part([4], 0, seed=1, optimizer="sgd")
    start = save({0: (model, optimizer)})
    assert {"mean"} == {name.partition(".")[0] for name, _ in optimizer.named_state()}
    fresh = make_part([4], 0, optimizer="sgd")
    make_checkpoints(0, start=start).restore(*fresh, state=STATE)
    assert digests_of([(model, optimizer)]) == digests_of([fresh])


def test_the_library_reads_what_we_lay_out(tmp_path):
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a": torch.tensor(2.5),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "many": torch.arange(5),
        "yes": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
    }
    image = ShardImage(tensors)
    image.copy()
    path = tmp_path / "x.safetensors"
    path.write_bytes(image.data)
    found = load_file(path)
    assert tensors.keys() == found.keys()
    assert image.size == path.stat().st_size
    for name, tensor in tensors.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor, found[name])


def test_a_checkpoint_holds_what_the_tensors_were_when_it_was_made(make_part, save, make_checkpoints, tmp_path):
    model, optimizer = make_part([4], 0, seed=1)
    before = digests_of([(model, optimizer)])
    checkpoints = make_checkpoints(0)
    checkpoints.save(10, model, optimizer, owners=[0], state=STATE)
    model.grads_N.fill_(1.0)
    optimizer.step(11, norm=1.0)
    checkpoints.finish()
    assert before != digests_of([(model, optimizer)])
    stored = load_file(tmp_path / f"{contract.checkpoint_dir(10)}.tmp" / contract.shard_file(0))
    assert before == {
        name.removeprefix("optimizer."): digest(name.removeprefix("optimizer."), t) for name, t in stored.items()
    }


def test_an_update_waits_until_its_tensors_have_been_copied(make_part):
    model, optimizer = make_part([4], 0, seed=1)
    before, reached, may_go_on = model.weights_N.clone(), threading.Event(), threading.Event()

    def ready():
        reached.set()
        assert may_go_on.wait(20)

    optimizer.wait_before_update(ready)
    model.grads_N.fill_(1.0)
    updating = threading.Thread(target=optimizer.step, args=(1,), kwargs={"norm": 1.0})
    updating.start()
    assert reached.wait(20)
    assert torch.equal(before, model.weights_N)
    may_go_on.set()
    updating.join()
    assert not torch.equal(before, model.weights_N)


@pytest.mark.parametrize(
    ("interval", "due"), [(10, [10, 20, 25]), (25, [25]), (1, list(range(1, 26))), (1000, [25]), (None, [])]
)
def test_a_checkpoint_is_due_at_every_interval_and_after_the_last_step(make_checkpoints, interval, due):
    checkpoints = make_checkpoints(0, interval=interval)
    assert due == [step for step in range(1, 26) if checkpoints.is_due(step, last_step=25)]


def test_a_shard_that_cannot_be_written_ends_the_run_and_names_the_file(make_part, make_checkpoints, tmp_path):
    (tmp_path / contract.CHECKPOINTS_DIR).write_text("in the way")
    checkpoints = make_checkpoints(0)
    checkpoints.save(10, *make_part([4], 0, seed=1), owners=[0], state=STATE)
    path = tmp_path / "checkpoints/step-10.tmp/rank-0.safetensors"
    with pytest.raises(CheckpointWriteError) as caught:
        checkpoints.finish()
    assert f"step 10: {path}: not a directory" == str(caught.value)


def test_a_shard_that_cannot_be_written_is_only_noted_if_so_configured(make_part, make_checkpoints, tmp_path):
    (tmp_path / contract.CHECKPOINTS_DIR).write_text("in the way")
    checkpoints = make_checkpoints(0, on_error="continue")
    checkpoints.save(10, *make_part([4], 0, seed=1), owners=[0], state=STATE)
    checkpoints.finish()
    path = tmp_path / "checkpoints/step-10.tmp/rank-0.safetensors"
    assert [(10, f"{path}: not a directory")] == make_checkpoints.lost


def test_a_half_written_shard_leaves_nothing_behind(make_part, make_checkpoints, tmp_path, monkeypatch):
    """A full disk: writing fails in the middle."""
    real, wrote = os.write, []

    def write(descriptor, data):
        if wrote:
            raise OSError(28, "No space left on device")
        wrote.append(real(descriptor, data[:1000]))
        return wrote[0]

    monkeypatch.setattr(os, "write", write)
    checkpoints = make_checkpoints(0)
    checkpoints.save(10, *make_part([4], 0, seed=1), owners=[0], state=STATE)
    with pytest.raises(CheckpointWriteError, match="no space left on device"):
        checkpoints.finish()
    assert [] == list((tmp_path / "checkpoints/step-10.tmp").iterdir())


@pytest.mark.parametrize(("spare", "is_root", "fits"), [(0, True, True), (-1, True, False), (0, False, False)])
def test_a_shard_that_would_fill_the_disk_is_not_begun(
    make_part, make_checkpoints, tmp_path, monkeypatch, spare, is_root, fits
):
    """Until it were removed, nobody could write a record; a part of the disk is for root alone."""
    part = make_part([4], 0, seed=1)
    whole = make_checkpoints(0)
    whole.save(5, *part, owners=[0], state=STATE)
    whole.finish()
    size = (tmp_path / "checkpoints/step-5.tmp/rank-0.safetensors").stat().st_size
    free = size + 1024 * 1024 + spare
    disk = SimpleNamespace(f_blocks=2 * free, f_bfree=free, f_bavail=free - 1, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1000)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: opened.append(str(path)) or real(path, *more))
    checkpoints = make_checkpoints(0, on_error="continue")
    checkpoints.save(10, *part, owners=[0], state=STATE)
    checkpoints.finish()
    path = tmp_path / "checkpoints/step-10.tmp/rank-0.safetensors"
    assert fits == path.exists() == any(name.startswith(str(path)) for name in opened)
    assert ([] if fits else [(10, f"{path}: no space left on device")]) == make_checkpoints.lost


@pytest.mark.parametrize("values", [1, 1000, 1024, 5000])
@pytest.mark.parametrize("refuses", [None, "open", "write"])
def test_a_file_system_that_wants_its_page_cache_gets_the_same_bytes(tmp_path, monkeypatch, values, refuses):
    real = {"open": os.open, "write": os.write}
    past_the_cache = set()

    def open_(path, flags, mode=0o777):
        if refuses == "open" and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        descriptor = real["open"](path, flags, mode)
        (past_the_cache.add if flags & os.O_DIRECT else past_the_cache.discard)(descriptor)
        return descriptor

    def write(descriptor, data):
        if refuses == "write" and descriptor in past_the_cache:
            raise OSError(22, "Invalid argument")
        return real["write"](descriptor, data)

    image = ShardImage({"w": torch.arange(values, dtype=torch.float32)})
    image.copy()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_)
        patched.setattr(os, "write", write)
        write_durably(tmp_path / "file", image)
    assert bytes(image.data) == (tmp_path / "file").read_bytes()


def test_what_cannot_be_copied_is_an_error_and_leaves_nothing_behind(
    make_part, make_checkpoints, tmp_path, monkeypatch
):
    """Writing and hashing, which follow the copy, must not wait for it for ever."""

    def copy(image):
        try:
            raise RuntimeError("CUDA error: unspecified launch failure")
        finally:
            image._say_final(image.size)

    monkeypatch.setattr(ShardImage, "copy", copy)
    checkpoints = make_checkpoints(0)
    checkpoints.save(10, *make_part([4], 0, seed=1), owners=[0], state=STATE)
    with pytest.raises(CheckpointWriteError, match="unspecified launch failure"):
        checkpoints.finish()
    assert [] == list((tmp_path / "checkpoints/step-10.tmp").iterdir())


def test_bytes_are_final_only_once_they_have_been_copied():
    image = ShardImage({"a": torch.ones(1024), "b": torch.ones(1024)})
    image.begin()
    seen = []
    reading = threading.Thread(
        target=lambda: seen.extend(iter(lambda: image.final_after(seen[-1] if seen else 0), image.size))
    )
    reading.start()
    assert [] == seen
    image.copy()
    reading.join(20)
    assert not reading.is_alive()
    assert set(seen) <= {image.size - 4096}  # the first tensor's end, if it was seen before the second's


def test_a_checkpoint_is_not_complete_before_its_last_shard(make_part, make_checkpoints, tmp_path):
    for rank in (0, 1):
        assert [] == complete_checkpoints(tmp_path, PLAN, run_id="run")
        checkpoints = make_checkpoints(rank)
        checkpoints.save(10, *make_part([2, 2], rank, seed=1), owners=[0, 1], state=STATE)
        checkpoints.finish()
    assert [10] == complete_checkpoints(tmp_path, PLAN, run_id="run")
    names = sorted(path.name for path in (tmp_path / "checkpoints/step-10").iterdir())
    assert ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"] == names


def test_a_file_that_changed_after_the_check_is_refused(make_part, make_checkpoints, save):
    start = save({0: make_part([4], 0, seed=1)})
    with Path(start["files"][0]["path"]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(CheckpointReadError, match="differs from what the launching machine found"):
        make_checkpoints(0, start=start).restore(*make_part([4], 0), state=STATE)


def test_a_tensor_that_is_missing_is_named(make_part, make_checkpoints, save):
    start = save({0: make_part([2, 2], 0, seed=1)})
    with pytest.raises(CheckpointReadError) as caught:
        make_checkpoints(0, start=start).restore(*make_part([1, 1, 2], 2), state=STATE)
    # Two blocks of 12 parameters and a head of 3, each with a mean, a square and a step: 27 * 4 = 108.
    assert "no `blocks.2.attention_in.bias` nor 107 other tensors of this rank in" in str(caught.value)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(2, 3)}, path)
    entry = {"path": str(path), "sha256": sha256(path)}
    with pytest.raises(CheckpointReadError) as caught:
        read_tensors([entry], into={"w": torch.zeros(3, 2)})
    assert f"`w` of {path} is float32 (2, 3), this model's is float32 (3, 2)" == str(caught.value)


def test_data_at_another_position_is_refused(make_part, make_checkpoints, save):
    start = save({0: make_part([4], 0, seed=1)})
    other = {"data": {"epoch": 1, "sample": 0}, "loss_scaler": None}
    with pytest.raises(CheckpointReadError, match="next sample is"):
        make_checkpoints(0, start=start).restore(*make_part([4], 0), state=other)


class WithoutSplits:
    """A model that was wrapped without what checkpoints need."""

    copies = frozenset()

    def __init__(self, model):
        self.named_parameters = model.named_parameters


def test_a_model_that_cannot_be_saved_ends_the_run_at_its_start(make_part, make_checkpoints):
    model, optimizer = make_part([4], 0, seed=1)
    message = "checkpoints need `splits` and `names_of_whole` of WithoutSplits, which has no such attribute"
    with pytest.raises(TypeError, match=message):
        make_checkpoints(0).restore(WithoutSplits(model), optimizer, state=STATE)
    with pytest.raises(
        TypeError, match="`named_state`, `wait_before_update`, `scaler_state` and `restore_scaler` of SGD"
    ):
        make_checkpoints(0).restore(model, torch.optim.SGD(model.parameters()), state=STATE)


def test_a_model_that_cannot_be_saved_ends_its_first_step_and_not_its_hundredth(
    make_part, make_checkpoints, make_cfg, corpus, tmp_path
):
    model, optimizer = make_part([4], 0, seed=1)
    ctx = RankContext(
        world=World(tmp_path, "single", ("trainer",), ("here",), (0,), {}, None, None),
        rank=Rank(0),
        communicator=InProcessWorld(["trainer"]).communicator(0),
        records=ProgressWriter(tmp_path, 0),
        device=torch.device("cpu"),
        corpus=corpus,
        checkpoints=make_checkpoints(0, interval=100),
    )
    ctx.data(make_cfg())
    with pytest.raises(TypeError, match="checkpoints need `splits`"):
        ctx.checkpoint(1, WithoutSplits(model), optimizer)


def test_a_run_without_checkpoints_needs_no_model_that_can_be_saved(make_part, make_checkpoints):
    model, optimizer = make_part([4], 0, seed=1)
    make_checkpoints(0, interval=None).restore(WithoutSplits(model), optimizer, state=STATE)


def test_initial_weights_leave_the_optimizer_as_it_is(make_part, make_checkpoints, tmp_path):
    """Any program's safetensors file with the model's names, in a shorter type too."""
    model, _ = make_part([4], 0, seed=1)
    path = tmp_path / "weights.safetensors"
    save_file({name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}, path)
    fresh, optimizer = make_part([4], 0, seed=2)
    kept = {name: tensor.clone() for name, tensor in optimizer.named_state()}
    start = {"step": 0, "files": [{"path": str(path), "sha256": sha256(path)}]}
    checkpoints = make_checkpoints(0, start=start)
    checkpoints.restore(fresh, optimizer, state=STATE)
    assert 0 == checkpoints.steps_done
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.bfloat16().float(), dict(fresh.named_parameters())[name])
    assert all(torch.equal(tensor, kept[name]) for name, tensor in optimizer.named_state())


def test_nothing_in_a_checkpoint_is_pickled(make_part, save, tmp_path):
    save({0: make_part([4], 0, seed=1)})
    for path in (tmp_path / "checkpoints/step-10").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert load_file(path)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
