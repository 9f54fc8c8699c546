"""`ttlaunch simulate`: the bits of a real run in one process, and the mistakes of a recipe with the lines they stand in."""

import errno
import json
from pathlib import Path

import pytest

from tests.forked import FORKED_LINE
from tests.recipes.peers import write_peers
from ttlaunch.running.checkpoints import complete

SMALL = {
    "training_config.steps": 8,
    "training_config.batch_size": 6,
    "training_config.micro_batch_size": 1,
    "training_config.validation_interval": 5,
    "training_config.validation_sequences": 4,
    "transformer_config.embedding_dim": 16,
    "transformer_config.num_heads": 2,
    "transformer_config.max_sequence_length": 16,
    "transformer_config.dropout_prob": 0.1,
}


def settings(values):
    return " ".join(f"--set {key}={value}" for key, value in values.items())


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        ("hierarchical_parallel --ranks 5", SMALL | {"multihost_config.num_workers": 3}),
        ("pipeline_parallel", SMALL),
        ("data_parallel", SMALL | {"multihost_config.num_workers": 3}),
        ("zero", SMALL | {"multihost_config.num_workers": 3}),
    ],
    ids=["three tiers", "pipeline", "data parallel", "zero"],
)
@pytest.mark.core
def test_a_simulated_recipe_has_the_bits_of_a_run(ttlaunch, recipe, values):
    """C6."""
    run = json.loads(ttlaunch(f"run {recipe} {settings(values)} {FORKED_LINE} --format json").stdout)
    simulated = json.loads(ttlaunch(f"simulate {recipe} {settings(values)} --format json").stdout)
    assert run["parameters_sha256"]
    for key in ("parameters_sha256", "last_validation", "steps", "layout", "world_size", "status"):
        assert run[key] == simulated[key]
    assert [] == simulated["diagnostics"]
    assert 0 < sum(edge["bytes"] for edge in simulated["edges"])


@pytest.mark.slow
def test_fabric_sockets_are_simulated_with_the_same_bits_and_messages(ttlaunch):
    """The meshes need links, as in a run; what crosses them is the same over sockets of any kind."""
    line = f"simulate data_parallel --on 2loudboxes {settings(SMALL)} --format json --set multihost_config.socket_type"
    mpi, fabric = (json.loads(ttlaunch(f"{line}={kind}").stdout) for kind in ("mpi", "fabric"))
    assert ("done", mpi["parameters_sha256"]) == (fabric["status"], fabric["parameters_sha256"])
    assert ([], mpi["edges"]) == (fabric["diagnostics"], fabric["edges"])
    refused = ttlaunch("simulate data_parallel --set multihost_config.socket_type=fabric")
    assert (3, True) == (refused.status, refused.stderr.startswith("error[P007]: "))


@pytest.mark.mpi
def test_the_smallest_recipe_gives_the_same_sum(ttlaunch):
    line = "fabric_minimal --ranks 3 --set all_reduce_config.megabytes=0.1 --set all_reduce_config.repeats=2"
    run, simulated = (json.loads(ttlaunch(f"{verb} {line} --format json").stdout) for verb in ("run", "simulate"))
    assert (3, 6.0) == (simulated["results"]["ranks"], simulated["results"]["sum"])
    assert run["results"]["sum"] == simulated["results"]["sum"]


def test_every_byte_is_counted(ttlaunch):
    """A ring all-reduce over three ranks of a vector of 3,000 values, once unmeasured; and one of 3 before each."""
    line = "fabric_minimal --ranks 3 --set all_reduce_config.megabytes=0.012 --set all_reduce_config.repeats=1"
    edges = json.loads(ttlaunch(f"simulate {line} --format json").stdout)["edges"]
    assert [(0, 1), (1, 2), (2, 0)] == [(edge["source"], edge["dest"]) for edge in edges]
    assert {(2 * (4 + 4), 2 * 4 * (4000 + 4))} == {(edge["messages"], edge["bytes"]) for edge in edges}


def test_what_ranks_print_comes_in_one_order(ttlaunch, here):
    write_peers(here / "talk", "def peer(cfg, ctx):\n    print('hello from', ctx.rank)\n")
    answer = ttlaunch("simulate ./talk --ranks 3")
    lines = [line for line in answer.stdout.splitlines() if line.startswith("hello")]
    assert [f"hello from {rank}" for rank in range(3)] == lines
    assert 0 == answer.status


def check_finding(answer, *texts):
    assert 1 == answer.status
    for text in texts:
        assert text in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_mismatch_is_shown_at_both_lines(ttlaunch, here):
    write_peers(
        here / "shapes",
        "def peer(cfg, ctx):\n"
        "    if ctx.rank == 0:\n"
        "        ctx.send(torch.zeros(3), dest=1)\n"
        "    else:\n"
        "        ctx.recv(torch.zeros(2, 2), source=0)\n",
    )
    check_finding(
        ttlaunch("simulate ./shapes --ranks 2"),
        "error[R020]: rank 0 (peer) sends float32 of shape (3,) where rank 1 (peer) receives float32 of shape (2, 2)",
        "shapes/trainer.py:7:9",
        "shapes/trainer.py:5:9",
        "rank 0 (peer) sends float32 of shape (3,) to rank 1 (peer), tag 0",
    )


def test_a_deadlock_is_shown_with_who_waits_for_whom(ttlaunch, here):
    write_peers(
        here / "both",
        "def peer(cfg, ctx):\n    ctx.send(torch.ones(2), dest=1 - ctx.rank)\n    ctx.recv(torch.ones(2), source=1 - ctx.rank)\n",
    )
    check_finding(
        ttlaunch("simulate ./both --ranks 2"),
        "error[R021]: ranks wait for each other: 0 → 1 → 0",
        "both/trainer.py:4:5",
        "hint: let one of them receive first",
    )


def test_a_rank_that_raises_is_named_with_its_line(ttlaunch, here):
    write_peers(
        here / "breaks",
        "def peer(cfg, ctx):\n    if ctx.rank == 1:\n        raise ValueError('no such bucket')\n"
        "    ctx.recv(torch.ones(2), source=1)\n",
    )
    answer = ttlaunch("simulate ./breaks --ranks 2 --format json")
    report = json.loads(answer.stdout)
    assert (1, "failed", 1) == (answer.status, report["status"], report["failure"]["rank"])
    (found,) = report["diagnostics"]
    assert "R002" == found["code"]
    assert found["message"].startswith("rank 1 (peer, localhost) raised ValueError")
    assert "breaks/trainer.py" in answer.stdout
    assert "mpirun" not in answer.stdout


def test_a_process_that_dies_is_told(ttlaunch, here):
    write_peers(here / "dies", "import os\ndef peer(cfg, ctx):\n    os._exit(7)\n")
    answer = ttlaunch("simulate ./dies --ranks 2")
    assert (1, True) == (answer.status, "the process of all ranks ended with status 7" in answer.stderr)


def test_nothing_is_left_in_the_working_folder(ttlaunch, here):
    write_peers(here / "quiet", "def peer(cfg, ctx):\n    pass\n")
    assert 0 == ttlaunch("simulate ./quiet --ranks 2").status
    assert ["quiet"] == [path.name for path in here.iterdir()]


def test_mistakes_of_the_description_are_told_as_by_run(ttlaunch):
    line = "hierarchical_parallel --set training_config.batch_sizes=4"
    run, simulated = ttlaunch(f"run {line}"), ttlaunch(f"simulate {line}")
    assert (3, run.stderr) == (simulated.status, simulated.stderr)


def test_a_program_is_refused(ttlaunch, here):
    (here / "train.py").write_text("print('hello')\n")
    answer = ttlaunch("simulate train.py")
    assert (2, True) == (answer.status, "`simulate` takes a recipe; train.py is a program" in answer.stderr)


def test_what_is_kept_is_a_checkpoint_like_any_other(ttlaunch, here):
    simulated = json.loads(
        ttlaunch(f"simulate hierarchical_parallel --ranks 4 {settings(SMALL)} --out kept --format json").stdout
    )
    assert ["step-8"] == [path.name for path in (here / "kept/checkpoints").iterdir()]
    assert 50e6 < simulated["peak_memory_bytes"] < 4e9
    assert "wrote" in ttlaunch("weights export kept w.safetensors").stdout
    line = f"simulate data_parallel {settings(SMALL)} --set checkpoint_config.initial_weights=w.safetensors"
    begun = json.loads(ttlaunch(f"{line} --set training_config.learning_rate=1e-30 --format json").stdout)
    assert simulated["last_validation"] == begun["first_validation"]


def test_as_many_checkpoints_are_kept_as_by_a_run(ttlaunch, here):
    keys = {"interval": 1, "keep": 2, "keep_every": 3}
    kept = " ".join(f"--set checkpoint_config.{key}={value}" for key, value in keys.items())
    answer = ttlaunch(f"simulate hierarchical_parallel --ranks 1 {settings(SMALL)} --out kept {kept}")
    assert 0 == answer.status
    assert {"step-3", "step-6", "step-7", "step-8"} == {path.name for path in (here / "kept/checkpoints").iterdir()}


def test_a_simulation_never_writes_into_a_folder_that_is_there(ttlaunch, here):
    (here / "kept").mkdir()
    answer = ttlaunch("simulate hierarchical_parallel --out kept")
    assert (2, "error[P009]: kept already exists\n\nhint: name another folder\n\n") == (answer.status, answer.stderr)


@pytest.fixture
def full_when(monkeypatch):
    """`full_when(words)`: the disk is full for this process once such words are in the path that is written."""

    def arrange(words):
        def full(write):
            def checked(path, *arguments, **options):
                if words in str(path):
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                return write(path, *arguments, **options)

            return checked

        monkeypatch.setattr(Path, "write_text", full(Path.write_text))
        monkeypatch.setattr(complete, "open_unlinked", full(complete.open_unlinked))

    return arrange


def test_a_manifest_that_cannot_be_written_fails_the_simulation(ttlaunch, here, full_when):
    full_when("manifest.json")
    line = f"simulate hierarchical_parallel --ranks 4 {settings(SMALL)} --out kept"
    answer = ttlaunch(f"{line} --format json")
    (found,) = json.loads(answer.stdout)["diagnostics"]
    assert (1, "R010", "failed") == (answer.status, found["code"], json.loads(answer.stdout)["status"])
    assert "the run folder can no longer be used: no space left on device" == found["message"]
    assert [f"{here}/kept/checkpoints/step-8.tmp/manifest.json: no space left on device"] == found["notes"]
    answer = ttlaunch(f"{line}-again --set checkpoint_config.on_error=continue")
    assert (0, True) == (answer.status, "warning[R032]: step 8 has no checkpoint" in answer.stderr)


@pytest.mark.parametrize("keep", [True, False])
def test_a_folder_that_takes_no_files_is_refused(ttlaunch, full_when, keep):
    full_when("plan.json")
    name = "kept" if keep else "the folder for temporary files (`TMPDIR`)"
    answer = ttlaunch("simulate fabric_minimal" + " --out kept" * keep)
    message = f"error[P032]: {name} cannot be written: no space left on device\n\n"
    message += "hint: make room on this disk, or name a place on another one\n\n"
    assert (2, message) == (answer.status, answer.stderr)


def test_a_folder_to_keep_that_cannot_be_made_is_refused(ttlaunch, here):
    (here / "file").write_text("")
    answer = ttlaunch("simulate fabric_minimal --out file/below")
    message = "error[P032]: file/below cannot be written: not a directory\n\n"
    message += "hint: a part of this path is a file; check its spelling\n\n"
    assert (2, "", message) == (answer.status, answer.stdout, answer.stderr)
