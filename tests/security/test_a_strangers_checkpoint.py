"""A checkpoint or a file of weights from a stranger: refused with a reason before anything starts, never followed or waited for."""

import hashlib
import json
import os
import shutil

import pytest

from tests.cli.conftest import trained  # noqa: F401 - a fixture
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import manifest_digest

RESUME = "run hierarchical_parallel --dry-run --format concise --resume"
WEIGHTS = "run hierarchical_parallel --dry-run --format concise --set checkpoint_config.initial_weights=w.safetensors"


def header_file(header, body=b""):
    """A file with any header; 8 bytes of its length come first."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def tensor(start, end, *, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


HEADERS = {
    "tensors that overlap": (
        header_file({"a": tensor(0, 4), "b": tensor(2, 6)}, bytes(6)),
        "tensor 'b' overlaps tensor 'a' by 2",
    ),
    "a tensor that runs backwards": (
        header_file({"a": tensor(0, 4), "b": tensor(4, 2, shape=[2])}, bytes(4)),
        "tensor 'b' ends at byte 2, before its beginning at byte 4",
    ),
    "a gap": (
        header_file({"a": tensor(0, 2), "b": tensor(4, 6)}, bytes(6)),
        "2 bytes between tensor 'a' and tensor 'b'",
    ),
    "a gap after the header": (header_file({"a": tensor(4, 6)}, bytes(6)), "4 bytes between the header and tensor 'a'"),
    "an absurd shape": (
        header_file({"a": tensor(0, 4, dtype="F32", shape=[2**40, 2**40])}, bytes(4)),
        "tensor 'a' has 4 bytes, its shape and type F32 take 4.835703278e+24",
    ),
    "a shape of too many dimensions": (header_file({"a": tensor(0, 4, shape=[1] * 65)}, bytes(4)), "has 65 dimensions"),
    "a negative length": (
        header_file({"a": tensor(0, 4, shape=[-4])}, bytes(4)),
        "tensor 'a': `shape.0` is -4, expected",
    ),
    "a length that is no number": (
        header_file({"a": tensor(0, 4, shape=["4"])}, bytes(4)),
        "tensor 'a': `shape.0` is '4'",
    ),
    "an unknown type": (header_file({"a": tensor(0, 4, dtype="X9")}, bytes(4)), "tensor 'a' has the unknown type 'X9'"),
    "a type of another size": (header_file({"a": tensor(0, 4, dtype="F32")}, bytes(4)), "type F32 take 16"),
    "places beyond the file": (
        header_file({"a": tensor(0, 2**50)}),
        "it has 98 bytes, its header says 1125899906842722",
    ),
    "a header longer than the file": ((2**40).to_bytes(8, "little") + b"{}", "it is no safetensors file"),
    "a header that is nested": (header_file(b'{"a":' + b"[" * 100_000), "its header is not that of a safetensors file"),
    "a part of another shape": (
        header_file({"a@0:4/8": tensor(0, 2)}, bytes(2)),
        "of another shape than its name says",
    ),
    "metadata that is no text": (
        header_file({"__metadata__": {"a": [1]}, "a": tensor(0, 2)}, bytes(2)),
        "its header is not that of a safetensors file",
    ),
}


@pytest.fixture
def stranger(trained, here):  # noqa: F811 - the fixture above
    """`stranger(change)`: a checkpoint whose manifest was changed, with a right digest."""

    def make(change):
        folder = trained("a", 10) / contract.checkpoint_dir(10)
        place = folder / contract.CHECKPOINT_MANIFEST
        manifest = json.loads(place.read_text())
        change(manifest)
        place.write_text(json.dumps(manifest | {"sha256": manifest_digest(manifest)}))
        return folder

    return make


def rename_file(manifest, name):
    manifest["files"][name] = manifest["files"].pop("rank-1.safetensors")


MANIFESTS = {
    "a device": (lambda m: rename_file(m, "/dev/zero"), "names '/dev/zero', expected names such as"),
    "a path upwards": (lambda m: rename_file(m, "../../../secret"), "names '../../../secret', expected names"),
    "a file of another kind": (lambda m: rename_file(m, "notes.txt"), "names 'notes.txt', expected names"),
    "a path below": (lambda m: rename_file(m, "x/rank-1.safetensors"), "expected names such as"),
    "a rank with a newline": (lambda m: rename_file(m, "rank-1.safetensors\n"), "expected names such as"),
    "no files": (lambda m: m.update(files={}), "names no file"),
    "files as a list": (lambda m: m.update(files=[1]), "`files` is a list of 1, expected an object"),
    "a size that is a word": (
        lambda m: m["files"]["rank-1.safetensors"].update(size="x"),
        "`files.rank-1.safetensors.size`",
    ),
    "a step that is a word": (lambda m: m.update(step="xxx"), "`step` is 'xxx', expected a whole number"),
    "a step that is negative": (lambda m: m.update(step=-1), "`step` is -1, expected a whole number"),
    "a step that is huge": (lambda m: m.update(step=10**400), "`step` is a number too large"),
    "a configuration that is a list": (lambda m: m.update(config=[1]), "`config` is a list of 1, expected an object"),
    "a state without data": (lambda m: m.update(state={}), "`state.data` is missing"),
    "an early stop of another type": (
        lambda m: m["state"].update(early_stop={"best": "x", "misses": 0, "step": 1}),
        "`state.early_stop.best` is 'x', expected a number",
    ),
    "a loss scaler without a scale": (
        lambda m: m["state"].update(loss_scaler={"good_steps": 1, "skipped": 0}),
        "`state.loss_scaler` lacks a value",
    ),
    "open steps that are words": (
        lambda m: m["state"].update(loss_scaler={"open_steps": ["x"]}),
        "expected a whole number",
    ),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_no_run_writes_is_refused_with_the_wrong_value(ttlaunch, stranger, what):
    change, reason = MANIFESTS[what]
    stranger(change)
    for line in (f"{RESUME} a".replace("concise", "full"), "weights show a"):
        answer = ttlaunch(line)
        assert contract.STATUS_DESCRIPTION == answer.status
        assert "error[P021]" in answer.stderr
        notes = [note for note in answer.stderr.splitlines() if " = note: " in note]
        assert 1 == len(notes)
        assert "runs/a/checkpoints/step-10: manifest.json" in notes[0]
        assert reason in notes[0]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "nan", '"\ud800"'.encode("utf-8", "surrogatepass"), b"\0"]
)
def test_a_manifest_that_is_no_json_is_refused(ttlaunch, trained, text):  # noqa: F811
    place = trained("a", 10) / contract.checkpoint_dir(10) / contract.CHECKPOINT_MANIFEST
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    answer = ttlaunch(f"{RESUME} a")
    assert (contract.STATUS_DESCRIPTION, True) == (answer.status, "[P021]" in answer.stderr)


def put_pipe(path):
    path.unlink()
    os.mkfifo(path)


def put_link(path):
    kept = path.with_name(path.name + ".elsewhere")
    shutil.move(path, kept)
    path.symlink_to(kept)


def put_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [put_pipe, put_link, put_device])
@pytest.mark.parametrize("file", [contract.CHECKPOINT_MANIFEST, contract.shard_file(1)])
def test_only_regular_files_of_a_checkpoint_are_read(ttlaunch, trained, put, file):  # noqa: F811
    put(trained("a", 10) / contract.checkpoint_dir(10) / file)
    answer = ttlaunch(f"{RESUME} a".replace("concise", "full"))
    assert contract.STATUS_DESCRIPTION == answer.status
    reason = "it is no regular file" if put is put_pipe else "it is a link"
    assert f"{file}: {reason}\n" in answer.stderr


@pytest.mark.timeout(60)
def test_a_plan_that_is_a_named_pipe_is_not_waited_for(ttlaunch, trained):  # noqa: F811
    run = trained("a", 10)
    put_pipe(run / contract.PLAN_FILE)
    assert 0 == ttlaunch(f"{RESUME} runs/a/checkpoints/step-10").status
    assert 0 == ttlaunch(f"{RESUME} runs/a").status


@pytest.mark.parametrize("what", HEADERS)
def test_initial_weights_whose_header_is_wrong_are_refused_in_the_plan(ttlaunch, here, what):
    data, reason = HEADERS[what]
    (here / "w.safetensors").write_bytes(data)
    answer = ttlaunch(WEIGHTS)
    assert contract.STATUS_DESCRIPTION == answer.status
    assert "[C042]" in answer.stderr
    assert reason in answer.stderr
    shown = ttlaunch("weights show w.safetensors --format concise")
    assert contract.STATUS_USAGE == shown.status
    assert reason in shown.stderr


@pytest.mark.parametrize("what", HEADERS)
def test_a_shard_whose_header_is_wrong_is_refused_in_the_plan(ttlaunch, stranger, what):
    data, reason = HEADERS[what]
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tensors": []}
    folder = stranger(lambda manifest: manifest["files"].update({"rank-1.safetensors": entry}))
    (folder / "rank-1.safetensors").write_bytes(data)
    answer = ttlaunch(f"{RESUME} a".replace("concise", "full"))
    assert contract.STATUS_DESCRIPTION == answer.status
    assert "runs/a/checkpoints/step-10: rank-1.safetensors: " in answer.stderr
    assert reason in answer.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_initial_weights_that_are_no_regular_file_are_not_waited_for(ttlaunch, here, put):
    put(here / "w.safetensors")
    answer = ttlaunch(WEIGHTS)
    assert contract.STATUS_DESCRIPTION == answer.status
    assert "it is no regular file" in answer.stderr


def test_initial_weights_may_be_a_link_of_the_users(ttlaunch, here):
    (here / "kept").write_bytes(header_file({"a": tensor(0, 2)}, bytes(2)))
    (here / "w.safetensors").symlink_to("kept")
    assert 0 == ttlaunch(WEIGHTS).status


def unfinished(run):
    """A checkpoint that whoever resumes completes."""
    return (run / contract.checkpoint_dir(10)).rename(run / f"{contract.checkpoint_dir(20)}.tmp")


def test_completing_a_strangers_checkpoint_never_writes_through_a_link(ttlaunch, trained, here):  # noqa: F811
    run, mine = trained("a", 10), here / "mine.txt"
    mine.write_text("mine")
    folder = unfinished(run)
    (folder / contract.CHECKPOINT_MANIFEST).unlink()
    (folder / contract.CHECKPOINT_MANIFEST).symlink_to(mine)
    for rank in (0, 1):
        data = (folder / contract.shard_file(rank)).read_bytes()
        record = {"owners": [0, 1], "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tensors": []}
        (folder / contract.shard_record(rank)).write_text(json.dumps(record | {"state": {"data": {}}}))
    ttlaunch(f"{RESUME} a")
    assert "mine" == mine.read_text()


def test_a_folder_that_is_a_link_is_neither_completed_nor_emptied(ttlaunch, trained, here):  # noqa: F811
    run = trained("a", 10)
    elsewhere = unfinished(run).rename(here / "elsewhere")
    (elsewhere / contract.CHECKPOINT_MANIFEST).unlink()
    for rank in (0, 1):
        data = (elsewhere / contract.shard_file(rank)).read_bytes()
        record = {"owners": [0, 1], "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tensors": []}
        (elsewhere / contract.shard_record(rank)).write_text(json.dumps(record | {"state": {"data": {}}}))
    before = sorted(path.name for path in elsewhere.iterdir())
    (run / f"{contract.checkpoint_dir(20)}.tmp").symlink_to(elsewhere)
    ttlaunch(f"{RESUME} a")
    assert before == sorted(path.name for path in elsewhere.iterdir())


PARTS = {
    "a range that nobody can count": "a@0:1000000000000000000000000000000/1000000000000000000000000000000",
    "a range that ends before it begins": "a@4:0/4",
    "a range past the end": "a@0:9/4",
    "an empty bound": "a@",
}


@pytest.mark.parametrize("what", PARTS)
def test_a_name_that_names_no_part_is_that_of_a_whole_tensor(ttlaunch, stranger, what):
    data = header_file({PARTS[what]: tensor(0, 4)}, bytes(4))
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tensors": []}
    folder = stranger(lambda manifest: manifest["files"].update({"rank-1.safetensors": entry}))
    (folder / "rank-1.safetensors").write_bytes(data)
    answer = ttlaunch("weights show a --format concise")
    assert (0, f"{PARTS[what]}\tU8\t(4,)") == (answer.status, answer.stdout.splitlines()[0])


def test_parts_that_overlap_are_not_joined(ttlaunch, stranger):
    names = ["a@0:3/4,0:1/1", "a@2:3/4,0:1/1"]
    data = header_file({names[0]: tensor(0, 3, shape=[3, 1]), names[1]: tensor(3, 4, shape=[1, 1])}, bytes(4))
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "tensors": []}
    folder = stranger(lambda manifest: manifest["files"].update({"rank-1.safetensors": entry}))
    (folder / "rank-1.safetensors").write_bytes(data)
    shown = ttlaunch("weights show a --format concise").stdout
    assert names == [line.split("\t")[0] for line in shown.splitlines()[:2]]
