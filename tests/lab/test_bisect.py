"""Where two runs part, and why: a cause that repeats is told from one that does not."""

import json
import random

import pytest

from tests.lab.recorded_runs import record_run
from tests.runtime.flips import flipping
from ttlaunch.app.dialogue import Unattended
from ttlaunch.lab.bisect import bisect
from ttlaunch.lab.replay import prepare_replay
from ttlaunch.lab.repro import read_origin_of

pytestmark = pytest.mark.slow

LAYER = "blocks.1.feed_forward_in.weight"


def compared(left, right):
    dialogue = Unattended()
    return bisect(*(prepare_replay(read_origin_of(run), dialogue) for run in (left, right)))


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("bisect") / "runs"


@pytest.fixture(scope="module")
def plain(runs_dir):
    """A run with nothing wrong."""
    return record_run("data_parallel", runs_dir)


def test_two_runs_with_the_same_bits_on_other_numbers_of_ranks_are_the_same(plain, runs_dir):
    found = compared(plain, record_run("data_parallel", runs_dir, changed={"multihost_config.num_workers": 3}))

    assert ("same", 7, None) == (found.verdict, found.last_equal, found.first_different)
    assert ["layout"] == [cause.kind for cause in found.causes]


def test_a_changed_key_is_the_cause_and_the_update_the_first_thing_that_differs(plain, runs_dir):
    found = compared(plain, record_run("data_parallel", runs_dir, changed={"training_config.weight_decay": 0.3}))

    assert ("configuration", 1, "update") == (found.verdict, found.parting.step, found.parting.what)
    assert ["training_config.weight_decay"] == [cause.text.split(":")[0] for cause in found.causes]
    assert found.passes == 2


def test_other_texts_are_the_cause_and_the_first_inputs_that_differ_are_named(here, runs_dir):
    texts = ["to be or not to be, that is the question\n" * 100, "whether 'tis nobler in the mind to suffer\n" * 100]
    runs = []
    for number, text in enumerate(texts):
        (here / f"{number}.txt").write_text(text, encoding="utf-8")
        runs.append(
            record_run("data_parallel", runs_dir, changed={"training_config.data_path": str(here / f"{number}.txt")})
        )

    found = compared(*runs)

    assert ("data", 1, "inputs", 0) == (
        found.verdict,
        found.parting.step,
        found.parting.what,
        found.parting.micro_batch,
    )


@pytest.fixture(scope="module")
def flipped(runs_dir):
    """A run as `plain`, but for one bit of a parameter of rank 1, which flipped after step 6 and before that step's digests."""
    draw = random.Random(5)  # noqa: S311 - no secret
    return record_run("data_parallel", runs_dir, during=flipping(1, LAYER, draw, step=6))


def test_a_flipped_bit_is_hardware_in_the_run_that_its_own_replay_contradicts(plain, flipped):
    found = compared(flipped, plain)

    assert ("hardware", None, 1) == (found.verdict, found.parting, found.passes)
    (one,) = found.contradictions
    assert (flipped.name, 4, 6, (1,), (LAYER,)) == (one.run, one.after, one.step, one.ranks, one.tensors)


def test_a_contradiction_on_other_libraries_is_not_called_hardware(plain, flipped):
    path = flipped / "environment.json"
    known = path.read_text(encoding="utf-8")
    environment = json.loads(known)
    environment["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(environment), encoding="utf-8")

    found = compared(plain, flipped)

    path.write_text(known, encoding="utf-8")
    assert "libraries" == found.verdict
    assert [flipped.name] == [one.run for one in found.contradictions]


def test_two_runs_have_to_be_there_or_to_be_named(here, ttlaunch):
    answer = ttlaunch("bisect 3fa1")
    assert (2, "") == (answer.status, answer.stdout)
    assert "`bisect` compares two runs, and one is named" in answer.stderr
    assert "runs has 0 runs, and `bisect` compares two" in ttlaunch("bisect").stderr


def test_the_command_names_the_cause_and_diff_points_to_it(plain, runs_dir, ttlaunch):
    other = record_run("data_parallel", runs_dir, changed={"training_config.learning_rate": 0.001})

    answer = ttlaunch(f"bisect {plain} {other}")

    assert 1 == answer.status
    assert "cause            configuration" in answer.stdout
    assert "first difference step 1: the update of embedding.token.weight" in answer.stdout
    assert f"`ttlaunch bisect {plain.name} {other.name}`" in ttlaunch(f"diff {plain} {other}").stdout
