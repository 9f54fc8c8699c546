"""What a run was made of, read back from its folder."""

import json

import pytest

from ttlaunch import contract
from ttlaunch.running.readers.repeat import read_origin

TREE = {"commit": None, "recipe": {"tree": "0" * 40}}


@pytest.fixture
def folder(tmp_path):
    plan = {"recipe": {"folder": "recipes/classic_dp"}, "working_folder": str(tmp_path), "world_size": 3}
    plan |= {"ranks": [{"rank": rank} for rank in range(3)]}
    for name, content in ((contract.PLAN_FILE, plan), (contract.CODE_FILE, TREE)):
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / contract.ENVIRONMENT_FILE).write_text(json.dumps({"versions": {}}))
    return tmp_path


def record_updates(folder, *, rank, updates):
    file = folder / contract.progress_file(rank)
    file.parent.mkdir(exist_ok=True)
    lines = [
        {"kind": contract.KIND_UPDATE, "time": 1.0, "step": step, "task": step, "parts": parts, "epoch": epoch}
        for step, epoch, parts in updates
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_update_that_a_lost_worker_recorded_and_others_made_anew_is_that_of_the_others(folder, lost):
    before, theirs = [[0, 2, 0], [2, 4, 0], [4, 6, 0]], [[0, 3, 1], [3, 6, 1]]
    for rank in {0, 1, 2} - {lost}:
        record_updates(folder, rank=rank, updates=[(1, 1, before), (2, 2, theirs)])
    record_updates(folder, rank=lost, updates=[(1, 1, before), (2, 1, [[0, 2, 0], [2, 4, 1], [4, 6, 0]])])
    updates = read_origin(folder).updates
    assert [1, 2] == sorted(updates)
    assert tuple(map(tuple, theirs)) == updates[2].parts
