"""What `--resume`, `weights export` and `initial_weights` refuse, word for word, and what they take; nothing is started."""

import errno
import hashlib
import json
import os

import pytest

from ttlaunch import contract

from .tensor_files import tensor_file

RESUME = "run hierarchical_parallel --dry-run --format full --resume"


def test_the_plan_says_what_the_run_goes_on_from(trained, ttlaunch):
    run = trained("a", 10, 20)
    answer = ttlaunch("run hierarchical_parallel --dry-run --format json --resume latest")
    assert (0, "") == (answer.status, answer.stderr)
    start = json.loads(answer.stdout)["start"]
    folder = run / "checkpoints/step-20"
    data = [(folder / f"rank-{rank}.safetensors").read_bytes() for rank in (0, 1)]
    assert {
        "origin": str(folder),
        "step": 20,
        "passed_over": [],
        "state": {"data": {"epoch": 0, "sample": 320}},
        "files": [
            {
                "path": str(folder / f"rank-{rank}.safetensors"),
                "sha256": hashlib.sha256(data[rank]).hexdigest(),
                "bytes": len(data[rank]),
            }
            for rank in (0, 1)
        ],
    } == start


@pytest.mark.parametrize(
    "options",
    [
        "--ranks 1",
        "--ranks 3",
        "--set multihost_config.num_workers=3",
        "--set training_config.validation_interval=7",
        "--set checkpoint_config.interval=5",
    ],
)
def test_what_the_bits_do_not_depend_on_may_change(trained, ttlaunch, options):
    trained("a", 10)
    answer = ttlaunch(f"run hierarchical_parallel --dry-run --format concise --resume latest {options}")
    assert (0, "") == (answer.status, answer.stderr)


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ("precision=bf16", "loss_scale_config.initial_power=4"),
        ("optimizer=sgd", "training_config.beta2=0.5"),
        ("optimizer=sgd", "training_config.epsilon=0.5"),
        ("use_clip_grad_norm=false", "training_config.clip_grad_norm_max_norm=9"),
    ],
)
def test_a_key_that_only_another_way_of_training_reads_may_change(trained, ttlaunch, same, other):
    options = f"--set training_config.{same}"
    trained("a", 10, options=options)
    line = "run hierarchical_parallel --dry-run --format concise --resume latest"
    answer = ttlaunch(f"{line} {options} --set {other}")
    assert (0, "") == (answer.status, answer.stderr)
    read = {"precision": "fp16", "optimizer": "adamw", "use_clip_grad_norm": "true"}
    key = same.partition("=")[0]
    trained("b", 10, options=f"--set training_config.{key}={read[key]}")
    answer = ttlaunch(f"{line} --set training_config.{key}={read[key]} --set {other}")
    assert (3, True) == (answer.status, f"`{other.partition('=')[0]}` was " in answer.stderr)


def test_a_constant_schedule_may_go_on_for_longer(trained, ttlaunch):
    constant = "--set scheduler_config.type=constant"
    trained("a", 10, options=constant)
    line = (
        f"run hierarchical_parallel --dry-run --format concise --resume latest {constant} --set training_config.steps"
    )
    answer = ttlaunch(f"{line}=900")
    assert (0, "") == (answer.status, answer.stderr)


def test_a_newer_checkpoint_that_is_torn_is_passed_over_aloud(trained, ttlaunch):
    run = trained("a", 10, 20)
    (run / "checkpoints/step-20/rank-1.safetensors").unlink()
    answer = ttlaunch(f"{RESUME} a")
    assert (
        "warning[P022]: 1 newer checkpoint passed over; runs/a/checkpoints/step-10 is the newest that is whole\n"
        " = note: runs/a/checkpoints/step-20: rank-1.safetensors is missing\n\n"
    ) == answer.stderr
    assert 0 == answer.status


def test_a_run_that_ended_because_replicas_differed_goes_on_from_the_last_step_that_agreed_and_says_so(
    trained, ttlaunch
):
    run = trained("a", 10, 20)
    cause = "had other bits in `head.output.weight` than ranks 0 and 2"
    failure = {"class": "replicas_differ", "rank": 1, "host": "box-b", "step": 30, "cause": cause}
    (run / "report.json").write_text(json.dumps({"failure": failure}))
    answer = ttlaunch(f"{RESUME} a")
    assert (
        "warning[P052]: runs/a ended because its replicas differed; training goes on from step 20, in which all digests agreed\n"
        " = note: rank 1 on box-b had other bits in `head.output.weight` than ranks 0 and 2\n\n"
        "hint: if the same rank or host is named again, test its memory and its device\n\n"
    ) == answer.stderr
    assert 0 == answer.status


def test_resume_without_any_run_is_refused(refused):
    refused(f"{RESUME} latest", status=2)


def test_resume_of_a_run_without_a_checkpoint_is_refused(refused, trained):
    trained("a")
    refused(f"{RESUME} a", status=2)


def test_resume_of_a_run_that_is_not_there_is_refused(refused, trained):
    trained("a", 10)
    refused(f"{RESUME} nobodys-run", status=2)


@pytest.mark.parametrize("words", ["2026-08-23", "3fa1", "runs/2026-08-23T10-14-07-3fa1"])
def test_a_run_has_the_same_names_as_for_every_other_command(trained, ttlaunch, words):
    run = trained("2026-08-23T10-14-07-3fa1", 10)
    trained("2026-08-24T10-14-07-77b2", 20)
    answer = ttlaunch(f"run hierarchical_parallel --dry-run --format json --resume {words}")
    assert (0, "") == (answer.status, answer.stderr)
    assert str(run / "checkpoints/step-10") == json.loads(answer.stdout)["start"]["origin"]


def test_resume_of_a_name_that_two_runs_have_is_refused(trained, ttlaunch):
    for name in ("2026-08-23T10-14-07-3fa1", "2026-08-24T10-14-07-77b2"):
        trained(name, 10)
    answer = ttlaunch(f"{RESUME} 2026")
    assert (contract.STATUS_USAGE, True) == (answer.status, "error[P030]: `2026` may mean 2 runs\n" in answer.stderr)


def test_weights_are_not_exported_to_a_file_without_a_name(trained, ttlaunch):
    trained("a", 10)
    answer = ttlaunch(["weights", "export", "a", ""])
    assert (contract.STATUS_USAGE, "error[P009]: an empty text names no file to write\n\n") == (
        answer.status,
        answer.stderr,
    )


@pytest.mark.parametrize("words", ["", " "], ids=["empty", "blank"])
def test_resume_of_an_empty_name_is_refused(refused, trained, monkeypatch, words):
    run = trained("a", 10)
    monkeypatch.chdir(run)  # which must not be what an empty text means
    refused([*RESUME.split(), words], status=2)


def test_resume_of_a_file_of_a_checkpoint_names_its_folder(refused, trained):
    run = trained("a", 10)
    refused(f"{RESUME} runs/a/checkpoints/step-10/{contract.CHECKPOINT_MANIFEST}", status=2)
    assert (run / contract.checkpoint_dir(10) / contract.CHECKPOINT_MANIFEST).is_file()


def test_weights_of_a_folder_without_a_checkpoint_are_refused(refused):
    refused("weights show .", status=2)


def test_resume_with_other_switches_says_them_as_a_file_does(refused, trained):
    trained("a", 10)
    refused(f"{RESUME} latest --set transformer_config.tie_embeddings=true", status=3)


def test_resume_of_torn_checkpoints_only_is_refused(refused, trained):
    run = trained("a", 10, 20)
    (run / "checkpoints/step-20/manifest.json").unlink()
    (run / "checkpoints/step-10/rank-0.safetensors").write_bytes(b"")
    refused(f"{RESUME} latest", status=3)


def test_resume_of_another_training_is_refused(refused, trained):
    trained("a", 10)
    options = "--set training_config.seed=1 --set training_config.steps=200 --set device_config.threads_per_rank=2"
    refused(f"{RESUME} latest {options}", status=3)


def test_resume_of_a_training_whose_own_keys_are_not_given_now_is_refused(refused, trained):
    trained("a", 10, options="--set training_config.seed=1")
    refused(f"{RESUME} latest", status=3)


def test_resume_of_another_model_is_refused(refused, trained):
    trained("a", 10)
    refused(f"{RESUME} latest --set transformer_config.embedding_dim=32", status=3)


def test_resume_with_another_text_is_refused(refused, trained):
    trained("a", 10)
    text = "hello world " * 2000
    refused(f"{RESUME} latest --set training_config.data_path=t.txt", status=3, files={"t.txt": text})


def test_resume_past_the_end_is_refused(refused, trained):
    constant = "--set scheduler_config.type=constant"
    trained("a", 10, options=constant)
    refused(f"{RESUME} latest {constant} --set training_config.steps=9", status=3)


def test_resume_of_a_recipe_without_checkpoints_is_refused(refused):
    refused("run fabric_minimal --dry-run --resume latest", status=3)


def test_resume_of_a_script_is_refused(refused):
    refused("run work.py --dry-run --resume latest", status=3, files={"work.py": ""})


def test_initial_weights_that_are_not_there_are_refused(refused):
    refused("run hierarchical_parallel --dry-run --set checkpoint_config.initial_weights=w.safetensors", status=3)


@pytest.mark.parametrize(
    "data",
    [b"", b"hello world, this is no such file", tensor_file({"a": [1, 2]})[:-1], (2).to_bytes(8, "little") + b"[]"],
    ids=["empty", "text", "cut", "list"],
)
def test_initial_weights_that_are_no_safetensors_are_refused(refused, data):
    line = "run hierarchical_parallel --dry-run --set checkpoint_config.initial_weights=w.safetensors"
    refused(line, status=3, files={"w.safetensors": data})


def test_exported_weights_are_one_plain_file(trained, ttlaunch, here):
    trained("a", 10)
    answer = ttlaunch("weights export latest w.safetensors")
    assert (0, "wrote 2 tensors of step 10 to w.safetensors\n", "") == (answer.status, answer.stdout, answer.stderr)
    data = (here / "w.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
    } == json.loads(data[8 : 8 + length])
    assert bytes([4, 5, 6, 1, 2]) == data[8 + length :]
    taken = ttlaunch(
        "run hierarchical_parallel --dry-run --format json --set checkpoint_config.initial_weights=w.safetensors"
    )
    start = json.loads(taken.stdout)["start"]
    assert (0, [hashlib.sha256(data).hexdigest()]) == (start["step"], [file["sha256"] for file in start["files"]])


def test_a_checkpoint_without_an_average_has_none_to_export(trained, refused):
    trained("a", 10)
    refused("weights export latest w.safetensors --average", status=2)


def test_weights_are_named_with_types_and_shapes(trained, ttlaunch):
    trained("a", 10)
    expected = "a  U8    (3,)\nb  U8    (2,)\n2 tensors, 5 values\n"
    answer = ttlaunch("weights show latest")
    chain = "no provenance: an older ttlaunch made this checkpoint\n"
    assert (0, expected + chain, "") == (answer.status, answer.stdout, answer.stderr)
    ttlaunch("weights export latest w.safetensors")
    assert expected == ttlaunch("weights show w.safetensors").stdout
    assert "a\tU8\t(3,)\nb\tU8\t(2,)\n" == ttlaunch("weights show a --format concise").stdout
    named = json.loads(ttlaunch("weights show a --format json").stdout)
    assert {"a": {"dtype": "U8", "shape": [3]}, "b": {"dtype": "U8", "shape": [2]}} == named["tensors"]


def test_a_file_without_weights_is_not_shown(refused):
    refused("weights show w.safetensors", status=2, files={"w.safetensors": "hello world"})


def test_weights_are_never_written_over_a_file(refused, trained):
    trained("a", 10)
    refused("weights export latest w.safetensors", status=2, files={"w.safetensors": "mine"})


def test_weights_for_a_folder_that_is_not_there_are_refused(refused, trained):
    trained("a", 10)
    refused("weights export latest no/such/folder/w.safetensors", status=2)


def test_weights_for_a_full_disk_are_refused_and_leave_nothing(refused, trained, monkeypatch):
    trained("a", 10)
    monkeypatch.setattr(os, "fsync", full_disk)
    refused("weights export latest w.safetensors", status=2)


def full_disk(_file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_weights_that_cannot_be_written_are_json_too(trained, ttlaunch):
    trained("a", 10)
    answer = ttlaunch("weights export latest no/w.safetensors --format json")
    (diagnostic,) = json.loads(answer.stdout)["diagnostics"]
    assert (2, "", "P032") == (answer.status, answer.stderr, diagnostic["code"])
    assert "no/w.safetensors cannot be written: no such file or directory" == diagnostic["message"]


def test_a_path_that_no_system_takes_is_refused(ttlaunch, trained):
    trained("a", 10)
    answer = ttlaunch(f"weights export latest {'w' * 300}")
    said = "cannot be written: file name too long\n\nhint: give a shorter name\n\n"
    assert (2, True) == (answer.status, answer.stderr.endswith(said))


def test_weights_of_no_run_are_refused(refused):
    refused("weights export latest w.safetensors", status=2)
