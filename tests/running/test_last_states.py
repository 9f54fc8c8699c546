"""States that workers saved from memory become a checkpoint only if they are whole, newer, and the same on all hosts."""

import hashlib
import json

import pytest

from ttlaunch import contract
from ttlaunch.running.checkpoints.last_states import take_in_last_state, whole_steps
from ttlaunch.running.checkpoints.resume import Checkpoint, find_checkpoint, verify

PLAN = {
    "world_size": 4,
    "ranks": [{"rank": rank, "host": f"box-{rank % 2}"} for rank in range(4)],
    "hash": "h",
    "recipe": {"name": "data_parallel"},
    "layout": "workers",
    "config": {},
}
STATE = {"data": {"epoch": 0, "sample": 3}}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / contract.PLAN_FILE).write_text(json.dumps(PLAN))
    return folder


def shard(content, name="w"):
    header = {name: {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def save(run, step, number, *, content=b"abc", name="w", has_shard=True, suffix="", **changed):
    folder = run / (contract.last_state_dir(step) + suffix)
    folder.mkdir(parents=True, exist_ok=True)
    data = shard(content, name)
    record = {"owners": [number], "state": STATE, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / contract.shard_record(number)).write_text(json.dumps({**record, "tensors": [name], **changed}))
    if has_shard:
        (folder / contract.shard_file(number)).write_bytes(data)
    return folder


def link(run):
    folder = save(run, 7, 0)
    (folder / "rank-0.json").rename(folder / "other")
    (folder / "rank-0.json").symlink_to("other")


def test_a_whole_state_becomes_a_checkpoint_that_says_who_saved_it(run):
    save(run, 7, 3)
    save(run, 7, 2, has_shard=False)  # another host has the same
    assert [] == take_in_last_state(run)
    found = verify(run / "checkpoints" / "step-7")
    assert isinstance(found, Checkpoint)
    assert (7, "worker-0003 on box-1", STATE) == tuple(found.manifest[key] for key in ("step", "saved_by", "state"))
    assert {"rank-3.safetensors"} == set(found.manifest["files"])
    assert [] == list((run / contract.LAST_STATES_DIR).iterdir())
    assert [] == take_in_last_state(run)


def test_slots_of_all_owners_become_a_checkpoint_and_those_of_another_cut_do_not_matter(run):
    for number in (0, 2, 3):
        save(run, 7, number, owners=[0, 2, 3], name=f"w{number}")
    save(run, 7, 1, owners=[0, 1, 2, 3])
    assert [7] == whole_steps(run)
    assert [] == take_in_last_state(run)
    found = verify(run / "checkpoints" / "step-7")
    assert isinstance(found, Checkpoint)
    assert ("the run's workers", STATE) == (found.manifest["saved_by"], found.manifest["state"])
    assert {f"rank-{number}.safetensors" for number in (0, 2, 3)} == set(found.manifest["files"])


def test_slots_of_an_older_step_are_taken_where_one_of_the_newest_is_missing(run):
    newest = save(run, 8, 0, owners=[0, 1])
    for number in (0, 1):
        save(run, 7, number, owners=[0, 1], name=f"w{number}")
    assert [7] == whole_steps(run)
    assert [newest] == [one.path for one in take_in_last_state(run)]
    assert [run / "checkpoints" / "step-7"] == list((run / "checkpoints").iterdir())


def test_a_state_that_is_not_newer_than_the_newest_checkpoint_stays_where_it_is(run):
    save(run, 7, 3)
    take_in_last_state(run)
    kept = [save(run, step, 0) for step in (6, 7)]
    assert [] == take_in_last_state(run)
    assert all(folder.is_dir() for folder in kept)


def test_an_older_state_that_is_whole_takes_the_place_of_one_that_is_not(run):
    torn = save(run, 8, 1, suffix=contract.UNFINISHED_SUFFIX)
    save(run, 7, 0)
    assert [torn] == [one.path for one in take_in_last_state(run)]
    assert [run / "checkpoints" / "step-7"] == list((run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: save(run, 7, 0, suffix=".tmp"), "it was not finished: its worker was killed while it wrote"),
        (lambda run: save(run, 7, 0, has_shard=False), "rank-0.safetensors is missing"),
        (lambda run: save(run, 7, 0, sha256="0" * 64), "rank-0.safetensors was changed: its SHA-256 differs"),
        (lambda run: save(run, 7, 0, size=9), f"rank-0.safetensors has {len(shard(b'abc'))} bytes, its record has 9"),
        (
            lambda run: save(run, 7, 0, owners=[0, 1]),
            "what worker-0001 owned of the state is missing",
        ),
        (
            lambda run: save(run, 7, 0, owners=[1, 2]),
            "rank-0.json names other owners of the state than its own worker",
        ),
        (lambda run: save(run, 7, 0, owners=[0, 0]), "rank-0.json names other owners of the state than its own worker"),
        (
            lambda run: [save(run, 7, number, owners=[0, 1]) for number in (0, 1)] + [save(run, 7, 4)],
            "worker-0004 is none of the run's 4 workers",
        ),
        (
            lambda run: [save(run, 7, number, owners=[0, 1], has_shard=number == 0) for number in (0, 1)],
            "rank-1.safetensors is missing",
        ),
        (
            lambda run: [save(run, 7, number, owners=[0, 1], state={"loss_scaler": number}) for number in (0, 1)],
            "its workers have saved different states of training",
        ),
        (lambda run: save(run, 7, 4), "worker-0004 is none of the run's 4 workers"),
        (lambda run: save(run, 7, 0, size=-1), "rank-0.json cannot be used: `size` is -1, expected"),
        (
            lambda run: (save(run, 7, 0), save(run, 7, 1, content=b"abd")),
            "worker-0000 and worker-0001 have saved different bits of the same step",
        ),
        (lambda run: (run / contract.last_state_dir(7)).mkdir(parents=True), "it has no record"),
        (link, "rank-0.json: it is a link"),
    ],
)
def test_a_state_that_is_not_whole_is_refused_by_name(run, change, reason):
    change(run)
    [refused] = take_in_last_state(run)
    assert refused.reason.startswith(reason)
    assert not (run / "checkpoints").exists() or [] == list((run / "checkpoints").iterdir())
    search = find_checkpoint("a", runs_folder=run.parent, working_folder=run.parent)
    assert (None, [refused.path]) == (search.checkpoint, [one.path for one in search.passed_over])


def test_a_run_without_a_plan_has_no_state_to_take(run):
    save(run, 7, 0)
    (run / contract.PLAN_FILE).write_text("{}")
    [refused] = take_in_last_state(run)
    assert "plan.json of its run is no plan" == refused.reason
