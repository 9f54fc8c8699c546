"""`ttlaunch weights diff` and `stats`: what they say of files, and their exit status."""

import json

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def files(here):
    """`files(name, tensors)`: write a safetensors file into the current folder."""
    from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

    def write(name, **tensors):
        save_file({key: torch.tensor(value) for key, value in tensors.items()}, here / name)

    return write


def test_the_same_bits_end_with_0(ttlaunch, files):
    files("a", w=[1.0, 2.0])
    files("b", w=[1.0, 2.0])
    answer = ttlaunch("weights diff a b")
    assert (0, "a → b\n1 tensor the same to the last bit, 0 not\n") == (answer.status, answer.stdout)


def test_what_differs_is_said_tensor_by_tensor(ttlaunch, files):
    files("a", w=[[1.0, 2.0], [3.0, 4.0]], same=[1.0], old=[1.0], cut=[1.0, 2.0])
    files("b", w=[[1.0, 2.0], [3.0, 5.0]], same=[1.0], new=[1.0], cut=[1.0])
    answer = ttlaunch("weights diff a b")
    assert 1 == answer.status
    assert (
        "a → b\n"
        "old: only in a\n"
        "new: only in b\n"
        "cut: shape (2,) → (1,)\n"
        "w: 1 value differs, first at [1, 1]: 4.0 → 5.0; at most 1 apart, relative 0.2\n"
        "1 tensor the same to the last bit, 4 not\n"
    ) == answer.stdout


def test_differences_as_json(ttlaunch, files):
    files("a", w=[1.0, float("inf")])
    files("b", w=[1.0, 2.0])
    answer = ttlaunch("weights diff a b --format json")
    found = json.loads(answer.stdout)
    assert (1, False, 1) == (answer.status, found["same"], found["compared"])
    assert {"values": 1, "first": [1], "left": None, "right": 2.0, "largest": None, "relative": None} == found[
        "differences"
    ]["w"]


def test_statistics_count_what_is_not_finite(ttlaunch, files):
    files("a", w=[3.0, -4.0], bad=[1.0, float("nan"), float("inf")])
    answer = ttlaunch("weights stats a")
    assert 0 == answer.status
    bad, good, together = answer.stdout.splitlines()
    assert bad.endswith("mean 1, 1 NaN, 1 infinite")
    assert ["w", "norm", "5", "from", "-4", "to", "3", "mean", "-0.5"] == good.split()
    assert "2 tensors, 2 values that are not finite" == together
    answer = ttlaunch("weights stats a --format json")
    assert (5.0, 0) == tuple(json.loads(answer.stdout)["tensors"]["w"][key] for key in ("norm", "nan"))


def test_a_link_to_a_file_is_read(ttlaunch, files, here):
    files("a", w=[1.0])
    (here / "link").symlink_to("a")
    assert 0 == ttlaunch("weights diff a link").status


@pytest.mark.parametrize("command", ["diff a bad", "diff bad a", "stats bad", "diff a nowhere", "stats nowhere"])
def test_what_is_no_weights_is_refused(ttlaunch, files, here, command):
    files("a", w=[1.0])
    (here / "bad").write_bytes(b"PK\x03\x04" + b"x" * 100)
    answer = ttlaunch(f"weights {command}")
    assert 2 <= answer.status <= 5
    assert answer.stderr.startswith("error[")


def test_types_whose_values_are_not_read_are_compared_by_their_bytes(ttlaunch, here):
    from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

    for name, value in (("a", 1.0), ("b", 2.0), ("c", 1.0)):
        save_file({"w": torch.full((3,), value).to(torch.float8_e4m3fn)}, here / name)
    assert 0 == ttlaunch("weights diff a c").status
    answer = ttlaunch("weights diff a b")
    assert (1, True) == (answer.status, "w: other bytes; values of this type are not read" in answer.stdout)


def test_another_type_with_the_same_values_is_said(ttlaunch, here):
    from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

    save_file({"w": torch.ones(3)}, here / "a")
    save_file({"w": torch.ones(3).bfloat16()}, here / "b")
    answer = ttlaunch("weights diff a b --format concise")
    assert (1, "w\tdtype F32 → BF16\n") == (answer.status, answer.stdout)


def test_a_folder_of_transformers_is_not_compared_with_weights_of_other_names(ttlaunch, files, here):
    (here / "theirs").mkdir()
    files("ours", w=[1.0])
    files("theirs/model.safetensors", h=[1.0])
    answer = ttlaunch("weights diff ours theirs")
    assert (2, "") == (answer.status, answer.stdout)
    assert "hint: `ttlaunch weights import theirs FILE`" in answer.stderr
    assert 0 == ttlaunch("weights diff theirs theirs").status
