"""Completing, keeping and finding checkpoints, without a rank: shards are any bytes with a record."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest

from tests.cli.tensor_files import tensor_file
from tests.records.written import progress
from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.checkpoints.complete import (
    CheckpointKeeper,
    LostCheckpoints,
    complete_checkpoints,
    manifest_digest,
    remove_old,
)
from ttlaunch.running.checkpoints.resume import find_checkpoint
from ttlaunch.running.runs.files import open_unlinked
from ttlaunch.running.runs.run_folder import create_run_folder
from ttlaunch.running.watch import RankState, fold

PLAN = {
    "hash": "h",
    "recipe": {"name": "r"},
    "layout": "l",
    "world_size": 2,
    "config": {"checkpoint_config": {"keep": 2, "keep_every": 30, "on_error": "stop"}},
    "data": {"sha256": "t"},
}


def shard(rank, step):
    return tensor_file({"w": f"shard of rank {rank} in step {step}".encode()})


NO_MANIFEST = "manifest.json cannot be read as a manifest"
SIZE = len(shard(0, 10))


def write_shard(run, step, rank, *, owners=(0, 1), data=None):
    """What a rank leaves: its shard, then the record of it."""
    folder = run / f"{contract.checkpoint_dir(step)}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    data = shard(rank, step) if data is None else data
    (folder / contract.shard_file(rank)).write_bytes(data)
    record = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tensors": ["w"], "state": {"data": {}}}
    (folder / contract.shard_record(rank)).write_text(json.dumps(record | {"owners": list(owners), "step": step}))


def complete(run):
    return complete_checkpoints(run, PLAN, run_id=run.name)


@pytest.fixture
def make_run(tmp_path):
    """`make_run(name, steps)`: a run folder with whole checkpoints of these steps."""

    def make(name, steps):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / contract.PLAN_FILE).write_text(json.dumps(PLAN))
        for step in steps:
            write_shard(run, step, 0)
            write_shard(run, step, 1)
        assert list(steps) == complete(run)
        return run

    return make


@pytest.fixture
def find(tmp_path):
    """`find(where)`: the folder that was found, relative to the runs, and the reasons for those that were not taken."""

    def search(where="latest"):
        found = find_checkpoint(str(where), runs_folder=tmp_path / "runs", working_folder=tmp_path)
        path = found.checkpoint and str(found.checkpoint.path.relative_to(tmp_path / "runs"))
        return path, [f"{one.path.name}: {one.reason}" for one in found.passed_over]

    return search


def test_the_manifest_says_what_a_later_run_needs(make_run):
    run = make_run("a", [10])
    manifest = json.loads((run / "checkpoints/step-10/manifest.json").read_text())
    assert manifest.pop("sha256") == manifest_digest(manifest)
    assert {
        "run": "a",
        "step": 10,
        "format": 1,
        "plan": "h",
        "recipe": "r",
        "layout": "l",
        "world_size": 2,
        "config": PLAN["config"],
        "text_sha256": "t",
        "began_from": None,
        "state": {"data": {}},
        "files": {
            f"rank-{rank}.safetensors": {
                "size": SIZE,
                "sha256": hashlib.sha256(shard(rank, 10)).hexdigest(),
                "tensors": ["w"],
            }
            for rank in (0, 1)
        },
    } == manifest


def test_a_checkpoint_that_cannot_be_completed_is_lost_and_removed_where_training_goes_on_without_it(make_run):
    run, lost = make_run("a", [10]), {}
    for step in (20, 30):
        for rank in (0, 1):
            write_shard(run, step, rank)
    manifest = run / "checkpoints/step-20.tmp/manifest.json"
    manifest.mkdir()
    with pytest.raises(IsADirectoryError):
        complete(run)
    assert [30] == complete_checkpoints(run, PLAN, run_id="a", lose=lost.setdefault)
    assert {20: f"{manifest}: is a directory"} == lost
    assert {"step-10", "step-30"} == {path.name for path in (run / "checkpoints").iterdir()}


def test_only_unfinished_folders_of_lost_checkpoints_are_removed(make_run):
    """Others may still be completed by whoever resumes; several ranks' losses of one checkpoint are said once."""
    run, said = make_run("a", [10]), []
    write_shard(run, 20, 0)
    write_shard(run, 30, 0)
    view = SimpleNamespace(output=lambda stream, line: said.append((stream, line.decode())))
    lost, ranks = LostCheckpoints(view), [RankState(RankRow(rank, "box", rank, "worker")) for rank in range(2)]
    for state, reason in zip(ranks, ("a: full", "b: full"), strict=True):
        fold(state, progress({"kind": "lost_checkpoint", "time": 1.0, "step": 20, "reason": reason}))
        lost.notice(ranks, {})
    lost.notice(ranks, {10: "late", 20: "c: full"})
    assert ["warning[R032]: step 20 has no checkpoint: a: full", "warning[R032]: step 10 has no checkpoint: late"] == [
        line for _, line in said
    ]
    assert {"stderr"} == {stream for stream, _ in said}
    assert [(10, "late"), (20, "a: full")] == list(lost.clean_up(run).items())
    assert {"step-10", "step-30.tmp"} == {path.name for path in (run / "checkpoints").iterdir()}


def test_the_newest_of_a_run_is_taken_by_number_not_by_name(make_run, find):
    make_run("a", [5, 90, 100])
    assert ("a/checkpoints/step-100", []) == find()


def test_latest_is_of_the_newest_run_that_has_one(make_run, find):
    """D23: latest."""
    make_run("2026-01-01", [10])
    make_run("2026-01-02", [5])
    make_run("2026-01-03", [])
    assert ("2026-01-02/checkpoints/step-5", []) == find()
    assert ("2026-01-01/checkpoints/step-10", []) == find("2026-01-01")
    assert ("2026-01-01/checkpoints/step-10", []) == find("runs/2026-01-01")


def test_one_checkpoint_is_named_by_its_path(make_run, find, tmp_path):
    make_run("a", [10, 20])
    assert ("a/checkpoints/step-10", []) == find("runs/a/checkpoints/step-10")
    assert ("a/checkpoints/step-10", []) == find(tmp_path / "runs/a/checkpoints/step-10")
    assert ("a/checkpoints/step-10", []) == find("a/checkpoints/step-10")


def test_the_folder_of_checkpoints_stands_for_its_run(make_run, find):
    make_run("a", [10, 20])
    assert ("a/checkpoints/step-20", []) == find("runs/a/checkpoints")


def test_a_checkpoint_may_have_been_copied_anywhere_under_any_name(make_run, tmp_path):
    run = make_run("a", [10, 20])
    shutil.copytree(run / "checkpoints/step-10", tmp_path / "backup/best")
    for where in ("backup/best", tmp_path / "backup/best"):
        search = find_checkpoint(str(where), runs_folder=tmp_path / "runs", working_folder=tmp_path)
        assert (tmp_path / "backup/best", 10, []) == (
            search.checkpoint.path,
            search.checkpoint.step,
            search.passed_over,
        )
    flip(tmp_path / "backup/best/rank-0.safetensors")
    search = find_checkpoint("backup/best", runs_folder=tmp_path / "runs", working_folder=tmp_path)
    assert (None, ["rank-0.safetensors was changed: its SHA-256 differs"]) == (
        search.checkpoint,
        [one.reason for one in search.passed_over],
    )


def test_a_checkpoint_whose_name_is_of_another_step_is_never_the_newest(make_run, find):
    run = make_run("a", [10, 20])
    shutil.copytree(run / "checkpoints/step-10", run / "checkpoints/step-99")
    assert ("a/checkpoints/step-20", ["step-99: its manifest.json is that of step 10"]) == find()


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_a_run_without_a_launcher_left_is_completed(make_run, find):
    run = make_run("a", [10])
    write_shard(run, 20, 0)
    write_shard(run, 20, 1)
    assert ("a/checkpoints/step-20", []) == find()


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("rank-1.safetensors", cut, f"rank-1.safetensors has {SIZE - 1} bytes, the manifest has {SIZE}"),
        ("rank-1.safetensors", flip, "rank-1.safetensors was changed: its SHA-256 differs"),
        (
            "rank-0.safetensors",
            lambda path: path.write_bytes(b""),
            f"rank-0.safetensors has 0 bytes, the manifest has {SIZE}",
        ),
        ("rank-0.safetensors", lambda path: path.unlink(), "rank-0.safetensors is missing"),
        ("manifest.json", lambda path: path.unlink(), "manifest.json is missing"),
        ("manifest.json", cut, f"{NO_MANIFEST}: it is no JSON: Expecting ',' delimiter: line 38 column 1 (char 685)"),
        (
            "manifest.json",
            lambda path: path.write_bytes(b""),
            f"{NO_MANIFEST}: it is no JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        ("manifest.json", lambda path: path.write_text("[]"), f"{NO_MANIFEST}: it is a list of 0, expected an object"),
        (
            "manifest.json",
            lambda path: path.write_text(path.read_text().replace('"step": 20', '"step": 30')),
            "manifest.json was changed: its SHA-256 differs",
        ),
        (
            "manifest.json",
            lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 2')),
            "its format is 2, this version reads 1",
        ),
    ],
)
def test_a_torn_checkpoint_is_passed_over_with_the_reason(make_run, find, file, damage, reason):
    run = make_run("a", [10, 20])
    damage(run / "checkpoints/step-20" / file)
    if "json" in file and damage is cut:
        damage(run / "checkpoints/step-20" / file)  # the last byte is a line's end
    assert ("a/checkpoints/step-10", [f"step-20: {reason}"]) == find()
    assert (None, [f"step-20: {reason}"]) == find("runs/a/checkpoints/step-20")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "rank-1.json").unlink(), "it was not finished: no shard of rank 1"),
        (lambda folder: (folder / "rank-1.safetensors").unlink(), "it was not finished: no shard of rank 1"),
        (lambda folder: cut(folder / "rank-0.safetensors"), "it was not finished: no shard of rank 0"),
        (lambda folder: (folder / "rank-0.json").write_text('{"size'), "it was not finished: no shard of rank 0"),
        (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "it was not finished"),
    ],
)
def test_a_checkpoint_that_was_being_written_is_passed_over(make_run, find, damage, reason):
    """Killed between any two of the things that ranks do."""
    run = make_run("a", [10])
    write_shard(run, 20, 0)
    write_shard(run, 20, 1)
    damage(run / "checkpoints/step-20.tmp")
    assert ("a/checkpoints/step-10", [f"step-20.tmp: {reason}"]) == find()


@pytest.mark.parametrize("stop_at", range(1, 10))
def test_killed_while_completing_the_next_one_goes_on(make_run, find, monkeypatch, stop_at):
    """Every call that changes or flushes a file is the last one in turn."""
    run = make_run("a", [10])
    write_shard(run, 20, 0)
    write_shard(run, 20, 1)
    calls = []

    class Killed(BaseException):
        pass

    def dying(real):
        def call(*arguments, **options):
            calls.append(real)
            if len(calls) >= stop_at:
                raise Killed
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr("ttlaunch.running.checkpoints.complete.open_unlinked", dying(open_unlinked))
        for name in ("unlink", "rename"):
            patched.setattr(f"pathlib.Path.{name}", dying(getattr(type(run), name)))
        patched.setattr("os.fsync", dying(lambda _descriptor: None))
        with pytest.raises(Killed):
            complete(run)
    assert ("a/checkpoints/step-20", []) == find()


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (1, None, [70]),
        (2, None, [60, 70]),
        (3, 30, [30, 50, 60, 70]),
        (1, 10, [10, 20, 30, 40, 50, 60, 70]),
        (9, None, [10, 20, 30, 40, 50, 60, 70]),
    ],
)
def test_the_newest_stay_and_those_of_every_kth_step(make_run, keep, keep_every, left):
    """D23: keep N."""
    run = make_run("a", range(10, 80, 10))
    remove_old(run, keep=keep, keep_every=keep_every)
    assert left == sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def test_what_was_being_removed_when_somebody_was_killed_is_no_checkpoint_and_goes(make_run, find):
    run = make_run("a", [10, 20])
    (run / "checkpoints/step-20").rename(run / "checkpoints/step-20.removed")
    assert ("a/checkpoints/step-10", []) == find()
    remove_old(run, keep=3, keep_every=None)
    assert ["step-10"] == [path.name for path in (run / "checkpoints").iterdir()]


class Planned:
    """The part of a plan that the keeper sees."""

    def as_json(self):
        return PLAN


def test_the_keeper_completes_and_removes_while_the_run_goes_on(tmp_path, until):
    folder = create_run_folder(tmp_path / "runs")
    with CheckpointKeeper(Planned(), folder) as keeper:
        for step in (10, 20, 30, 40, 50):
            write_shard(folder.path, step, 0)
            write_shard(folder.path, step, 1)
            until((folder.path / contract.checkpoint_dir(step)).is_dir, within_s=20, what=f"step {step} is complete")
        write_shard(folder.path, 60, 0)
        write_shard(folder.path, 60, 1)
        keeper.finish()
    left = sorted(path.name for path in (folder.path / "checkpoints").iterdir())
    assert ["step-30", "step-50", "step-60"] == left
    events = [json.loads(line) for line in folder.file(contract.EVENTS_FILE).read_text().splitlines()]
    assert [10, 20, 30, 40, 50, 60] == [event["step"] for event in events if event["event"] == "checkpoint"]


def test_the_keeper_says_that_the_disk_is_full(tmp_path, until, monkeypatch):
    folder = create_run_folder(tmp_path / "runs")
    write_shard(folder.path, 10, 0)
    write_shard(folder.path, 10, 1)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)

    def has_failed():
        try:
            keeper.check()
        except OSError as error:
            return str(error)
        return None

    with CheckpointKeeper(Planned(), folder) as keeper:
        assert "[Errno 28] No space left on device" == until(has_failed, within_s=20, what="the keeper notices")


def test_a_step_that_another_worker_has_saved_again_is_one_checkpoint(make_run):
    run = make_run("a", [])
    write_shard(run, 10, 0, owners=[0])
    assert [10] == complete(run)
    write_shard(run, 10, 1, owners=[1])
    assert [] == complete(run)
    assert ["step-10"] == [path.name for path in (run / "checkpoints").iterdir()]
    write_shard(run, 20, 1, owners=[1])
    write_shard(run, 20, 0, owners=[0])
    (run / "checkpoints/step-20.tmp/rank-2.safetensors.tmp").touch()  # its worker ended
    assert [20] == complete(run)
    assert {"manifest.json", "rank-0.safetensors"} == {path.name for path in (run / "checkpoints/step-20").iterdir()}
