"""A checkpoint says where it comes from, and computed again it has the same bytes; what was changed, is gone or is old is said so."""

import hashlib
import json
import shutil
from contextlib import contextmanager

import pytest

from tests.lab.recorded_runs import record_run
from ttlaunch.app.dialogue import Unattended
from ttlaunch.lab import verify_checkpoint as module
from ttlaunch.lab.verify_checkpoint import check_chain, judged, verify_checkpoint
from ttlaunch.running.checkpoints.complete import manifest_digest
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.runs import provenance
from ttlaunch.running.runs.provenance import hash_of, provenance_of_next, read_provenance

OFTEN = {"checkpoint_config.interval": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two runs: the second one went on from step 4 of the first one, with three ranks in place of two."""
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def first(place):
    return record_run("data_parallel", place / "runs", changed=OFTEN)


@pytest.fixture(scope="module")
def second(place, first):
    changed = OFTEN | {"multihost_config.num_workers": 3}
    return record_run("data_parallel", place / "runs", changed=changed, resume=first / "checkpoints/step-4")


@pytest.fixture
def check(place):
    def verified(where, **options):
        return verify_checkpoint(str(where), Unattended(), runs_dir=place / "runs", working_folder=place, **options)

    return verified


@contextmanager
def moved(path):
    """While a folder is somewhere else."""
    away = path.with_name(f"{path.name}-away")
    path.rename(away)
    try:
        yield
    finally:
        away.rename(path)


@contextmanager
def edited(checkpoint, edit):
    """While a manifest is changed, with the hash that fits it."""
    path = checkpoint / "manifest.json"
    before = path.read_text(encoding="utf-8")
    manifest = json.loads(before)
    edit(manifest)
    path.write_text(json.dumps(manifest | {"sha256": manifest_digest(manifest)}), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def chain_of(checkpoint):
    return read_provenance(json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8")))


def test_a_chain_goes_through_a_resume_back_to_the_first_checkpoint(first, second):
    chain = chain_of(second / "checkpoints/step-7")

    links = [(one.run, one.step, one.after) for one in chain.links]
    assert [(first.name, 2, 0), (first.name, 4, 2), (second.name, 6, 4), (second.name, 7, 6)] == links
    hashes = [hash_of(vars(one)) for one in chain.links]
    assert [None, *hashes[:-1]] == [one.predecessor for one in chain.links]
    assert chain_of(first / "checkpoints/step-4").sha256 == hashes[1]
    began_from = chain.own_conditions.start
    assert (None, chain.links[1].state) == (chain.conditions[chain.links[0].conditions].start, began_from)
    assert chain.own_conditions.libraries["torch"]


def test_provenance_is_in_no_file_of_weights_so_their_hash_is_that_of_every_layout(first, second):
    files = [(run / "checkpoints/step-7/rank-0.safetensors").read_bytes() for run in (first, second)]
    assert files[0] == files[1]
    assert b"provenance" not in files[0]


@pytest.mark.slow
def test_the_whole_training_is_computed_again_through_all_runs(first, second, check):
    found = check(second, from_start=True)

    assert ("equal", 0) == (found.verdict, found.began)
    assert [(first.name, 0, 4), (second.name, 4, 7)] == [(one.run, one.began, one.step) for one in found.intervals]


@pytest.mark.slow
def test_a_checkpoint_whose_predecessors_are_gone_is_computed_from_what_is_there(first, second, check):
    with moved(second / "checkpoints/step-6"):
        found = check(second)
        assert ("equal", 4) == (found.verdict, found.began)
        assert "the computation began at step 4, because the checkpoint of step 6 is not here" in found.notes
    with moved(first):
        found = check(second, from_start=True)
        assert ("equal", 6) == (found.verdict, found.began)
        assert any(note.startswith("the steps up to 4 were not computed again") for note in found.notes)
        found = check(second / "checkpoints/step-6")
        assert ("unknown", "whole", ()) == (found.verdict, found.chain_state, found.intervals)
        assert "the checkpoint from which its run began is no longer there" in found.notes[0]


def test_a_copy_without_its_run_keeps_its_chain_and_is_not_called_equal(place, second, check):
    copy = place / "copy"
    shutil.copytree(second / "checkpoints/step-6", copy)
    try:
        with moved(second):
            found = check(copy)
    finally:
        shutil.rmtree(copy)
    assert ("unknown", "whole", None) == (found.verdict, found.chain_state, found.began)
    assert "is not here, so nothing was computed again" in found.notes[0]


def _break_chain(manifest):
    manifest["provenance"]["links"][0]["state"] = "0" * 64


def _other_code(manifest):
    conditions = manifest["provenance"]["conditions"]
    next(iter(conditions.values()))["code"] = "0" * 64


def _other_config(manifest):
    manifest["config"]["training_config"]["seed"] = 12345


def _other_past(manifest):
    """A whole chain of its own, with other predecessors than those that are there."""
    chain = manifest["provenance"]
    chain["links"] = chain["links"][2:]
    chain["links"][0]["state"] = "1" * 64
    chain["links"][1]["predecessor"] = hash_of(chain["links"][0])
    chain["sha256"] = hash_of(chain["links"][1])


def test_a_chain_that_was_changed_is_called_tampered_although_the_weights_are_equal(second, check):
    with edited(second / "checkpoints/step-7", _break_chain):
        found = check(second / "checkpoints/step-7")

    assert ("tampered", "tampered", "equal") == (found.verdict, found.chain_state, found.intervals[0].verdict)
    assert ["R092"] == [one.code for one in judged(found)]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_break_chain, "its chain is broken: step 4 of"),
        (_other_code, "what it says of code, configuration and libraries was changed"),
        (_other_config, "its configuration is another one than that of its provenance"),
        (_other_past, "the checkpoint of step 6 beside it is not the predecessor that its chain names"),
        (lambda one: one.update(provenance=[]), "`provenance` cannot be read: it is a list of 0, expected an object"),
    ],
)
def test_each_change_of_a_chain_is_named(second, edit, problem):
    checkpoint = second / "checkpoints/step-7"
    assert () == check_chain(verify(checkpoint), second)[1]
    with edited(checkpoint, edit):
        assert check_chain(verify(checkpoint), second)[1][0].startswith(problem)


def test_a_changed_weight_is_named_although_all_hashes_fit_it(place, first, ttlaunch):
    """Also of a checkpoint without provenance, which is computed again all the same."""
    copy = place / "changed"
    shutil.copytree(first / "checkpoints/step-4", copy)
    shard = copy / "rank-0.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    def rehash(manifest):
        manifest["files"]["rank-0.safetensors"]["sha256"] = hashlib.sha256(content).hexdigest()
        del manifest["provenance"]

    try:
        with edited(copy, rehash):
            answer = ttlaunch(f"verify {copy} --runs-dir {place / 'runs'} --format json")
    finally:
        shutil.rmtree(copy)
    found = json.loads(answer.stdout)
    assert (1, "different", "absent", None) == (
        answer.status,
        *map(found.get, ("verdict", "chain", "provenance_sha256")),
    )
    assert any("has no provenance, since an older ttlaunch has made it" in note for note in found["notes"])
    (other,) = found["intervals"][0]["other_tensors"]
    assert ["R092"] == [one["code"] for one in found["diagnostics"]]
    assert f"has other bits than its run computes: `{other}`" in found["diagnostics"][0]["message"]


def test_a_run_whose_folder_was_changed_contradicts_the_provenance(first):
    path = first / "code.json"
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(json.loads(before)["recipe"]["tree"], "0" * 64), encoding="utf-8")
    try:
        _, problems = check_chain(verify(first / "checkpoints/step-4"), first)
    finally:
        path.write_text(before, encoding="utf-8")
    assert (f"the folder of {first.name} has another code of the recipe than the provenance",) == problems


def test_the_command_says_what_is_proven_and_refuses_what_is_for_the_other_kind(first, place, ttlaunch, monkeypatch):
    monkeypatch.setattr(module, "cpu_class", lambda: "SVE")
    where = f"{first / 'checkpoints/step-4'} --runs-dir {place / 'runs'}"
    answer = ttlaunch(f"verify {where}")
    said = [
        line for line in answer.stderr.splitlines() if not line.startswith("computing ")
    ]  # a busy machine says how far it is
    assert (0, []) == (answer.status, said)
    assert "checkpoints/step-4: equal" in answer.stdout
    assert "all bytes of 116 tensors" in answer.stdout
    assert "proven from step 2 on; `--from-start` computes all of the training again" in answer.stdout
    assert "and this machine has SVE: other bits here would prove nothing" in answer.stdout
    answer = ttlaunch(f"verify {where} --ranks 2")
    assert (2, "") == (answer.status, answer.stdout)
    assert "`--ranks` is for a receipt, and this is a checkpoint" in answer.stderr
    assert (
        "`--from-start` is for a checkpoint, and this is a receipt" in ttlaunch("verify said.json --from-start").stderr
    )
    assert 2 == ttlaunch("verify nonesuch").status


def test_a_long_chain_keeps_its_newest_links_and_says_how_many_it_left_out(tmp_path, first, monkeypatch):
    monkeypatch.setattr(provenance, "MOST_LINKS", 5)
    plan = json.loads((first / "plan.json").read_text(encoding="utf-8"))
    content, before = {"run": first.name, "files": {}, "state": {}}, None
    for step in range(1, 9):
        found = provenance_of_next(first, plan, content | {"step": step}, before=before)
        before = tmp_path / "step"
        before.mkdir(exist_ok=True)
        (before / "manifest.json").write_text(json.dumps({"step": step, **found}), encoding="utf-8")
    chain = chain_of(before)
    assert (5, 3, 4) == (len(chain.links), chain.left_out, chain.links[0].step)
