"""Workers whose coordinator is gone save their newest state once a host, and a run that begins from it has the same bits."""

import hashlib
import json

import pytest

from tests.runtime.elastic.elastic_runs import ElasticRun, gate, in_one_process
from ttlaunch import contract
from ttlaunch.agent.worker_orders import order_to_save
from ttlaunch.runtime.checkpoint.image import ShardImage
from ttlaunch.runtime.checkpoint.last_state import save_last_slot, save_last_state
from ttlaunch.runtime.checkpoint.writer import CheckpointWriteError, Shard

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.mpi

CONFIG = {
    "training_config": {"steps": 6, "validation_interval": 3, "micro_batch_size": 2},
    "transformer_config": {"num_blocks": 1},
    "multihost_config": {"socket_type": "grpc"},
    "checkpoint_config": {"interval": None},
}


@pytest.fixture
def start(tmp_path):
    runs = []

    def start(name, **known):
        folder = tmp_path / name
        folder.mkdir()
        runs.append(ElasticRun(folder, CONFIG, **known))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def saved(folder):
    return sorted(path.relative_to(folder / contract.LAST_STATES_DIR) for path in folder.glob("last_states/*/*"))


def test_workers_without_a_coordinator_save_one_copy_of_the_newest_step_from_which_a_run_goes_on(start, tmp_path):
    run = start("first", first=3, faults={(2, "in a micro-batch", 4): gate("go on")})
    run.until(lambda run: min(map(run.applied, range(3))) == 3)
    assert [0, 1, 2] == order_to_save(str(run.folder))
    run.open("go on")
    run.finish()
    assert {0: 0, 1: 0, 2: 0} == run.statuses, run.story()
    [shard_record, shard] = saved(run.folder)
    assert "step-3" == str(shard.parent)
    record = json.loads((run.folder / contract.LAST_STATES_DIR / shard_record).read_text())
    path = run.folder / contract.LAST_STATES_DIR / shard
    assert record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    start_of = {"origin": "x", "step": 3, "state": record["state"]}
    start_of["files"] = [{"path": str(path), "sha256": record["sha256"], "bytes": record["size"]}]
    again = start("second", first=2, start=start_of).finish()
    assert {in_one_process(tmp_path / "alone", CONFIG)[0]} == {again.digest(number) for number in range(2)}


def test_a_worker_that_still_waits_for_its_first_state_saves_nothing(start):
    run = start("first", first=1, minimum=2)
    run.until(lambda run: 0 in run.state.workers)
    assert [0] == order_to_save(str(run.folder))
    run.finish()
    assert ({0: 0}, []) == (run.statuses, saved(run.folder))


def image_of(*values):
    return ShardImage({"weights": torch.tensor(values)})


def test_the_newest_step_of_a_host_replaces_older_ones_and_what_a_killed_worker_has_left(tmp_path):
    left = tmp_path / contract.LAST_STATES_DIR / "step-8.tmp"
    left.mkdir(parents=True)
    (left / "rank-0.safetensors.tmp").touch()
    assert save_last_state(tmp_path, image_of(1.0), shard=Shard(7, 0, (0,), {}))
    assert save_last_state(tmp_path, image_of(2.0), shard=Shard(8, 1, (1,), {}))
    assert not save_last_state(tmp_path, image_of(3.0), shard=Shard(8, 2, (2,), {}))
    assert not save_last_state(tmp_path, image_of(3.0), shard=Shard(7, 2, (2,), {}))
    assert ["step-8/rank-1.json", "step-8/rank-1.safetensors"] == list(map(str, saved(tmp_path)))


def test_slots_of_a_step_lie_beside_each_other_once_and_those_of_older_steps_stay(tmp_path):
    assert save_last_slot(tmp_path, image_of(1.0), shard=Shard(7, 0, (0, 1), {}))
    assert save_last_slot(tmp_path, image_of(2.0), shard=Shard(7, 1, (0, 1), {}))
    assert not save_last_slot(tmp_path, image_of(3.0), shard=Shard(7, 1, (0, 1), {}))  # by its shadow
    assert save_last_slot(tmp_path, image_of(4.0), shard=Shard(8, 0, (0, 1), {}))
    slots = [f"step-{step}/rank-{number}" for step, number in ((7, 0), (7, 1), (8, 0))]
    assert [f"{slot}.{kind}" for slot in slots for kind in ("json", "safetensors")] == list(map(str, saved(tmp_path)))
    assert [0, 1] == json.loads((tmp_path / contract.last_state_dir(7) / contract.shard_record(1)).read_text())[
        "owners"
    ]


def test_a_state_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    (tmp_path / contract.LAST_STATES_DIR).write_text("a file")
    with pytest.raises(CheckpointWriteError, match=r"step 3: .*last_states.*: not a directory"):
        save_last_state(tmp_path, image_of(1.0), shard=Shard(3, 0, (0,), {}))
