"""The bug museum: trainings that run, and whose loss falls, are caught by the checks that our recipes pass.

Each exhibit is a bug of the systems that users' documents describe, numbered as in `docs/explanation/bug-museum.md`, and
differs by a line or two from a training that passes everything.
"""

import re
from pathlib import Path

import pytest

from .judge import Judge

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/explanation/bug-museum.md"

BITS = "parameters are not those of one process"
REPLICAS = "ranks hold different parameters"
RING, SERVED = ["worker"] * 2, ["worker"] * 2 + ["server"]
CAUGHT = {
    "bug_07_forward_over_a_list": (
        RING,
        ['NotImplementedError: Module [ModuleDict] is missing the required "forward" function'],
    ),
    "bug_08_local_plus_mean": (RING, [REPLICAS, "`loss` differs from one process's in step 2"]),
    "bug_09_zeroes_only_its_own": (RING, [REPLICAS, "`loss` differs from one process's in step 3"]),
    "bug_10_clips_after_the_step": (RING, [BITS, "`loss` differs from one process's in step 2"]),
    "bug_11_clips_in_the_log_only": (RING, [BITS, "`loss` differs from one process's in step 2"]),
    "bug_12_shards_without_sharing_data": (
        RING,
        [BITS, "`loss` differs from one process's in step 2", "counts 0 -> 1: 0.000 of the formula"],
    ),
    "bug_15_server_drops_a_worker": (SERVED, ["R021: ranks wait for each other: 0 → 2 → 0"]),
    "bug_16_waits_for_ever_for_one": (
        SERVED,
        ["R021: rank 2 (server) waits for rank 1 (worker), which has ended"],
    ),
    "bug_17_server_never_ends": (SERVED, ["R021: rank 2 (server) waits for rank 0 (worker), which has ended"]),
    "bug_18_steps_twice": (RING, [BITS, "`loss` differs from one process's in step 2"]),
    "bug_21_micro_batches_not_scaled": (RING, ["`grad_norm` differs from one process's in step 1"]),
    "bug_22_ranks_with_more_steps": (
        RING,
        ["R021: rank 0 (worker) waits for rank 1 (worker), which has ended"],
    ),
    "bug_23_replicas_begin_different": (RING, [REPLICAS, "`loss` differs from one process's in step 1"]),
    "bug_27_threshold_rounds_down_to_one": (
        RING,
        [REPLICAS, "`tokens` differs from one process's in step 1", "counts 0 -> 1: 0.000 of the formula"],
    ),
    "bug_28_weights_through_int8": (
        SERVED,
        [REPLICAS, "`loss` differs from one process's in step 2", "weights 2 -> 0: 0.254 of the formula"],
    ),
}
RESUMED = {
    "bug_04_state_that_was_never_written": ["parameters are not those of the run that nobody interrupted"],
    "bug_06_step_done_twice": [
        "step 2 was done 2 times",
        "parameters are not those of the run that nobody interrupted",
    ],
}
OURS = {
    "as_it_should_be": [RING, ["worker"] * 3, ["worker"] * 4, SERVED],
    "data_parallel": [RING, ["worker"] * 3],
    "hierarchical_parallel": [["worker"] * 3 + ["aggregator_optimizer"], ["worker"] * 2 + ["aggregator", "optimizer"]],
    "sync_ps": [SERVED, ["worker"] * 3 + ["server"] * 2],
    "zero": [RING, ["worker"] * 3],
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory, corpus):
    return Judge(tmp_path_factory.mktemp("museum"), corpus)


@pytest.mark.parametrize(
    ("recipe", "roles"),
    [(recipe, roles) for recipe, all_roles in OURS.items() for roles in all_roles],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_ours_pass_every_check(judge, recipe, roles):
    """What the exhibits are judged by, and the training that each of them differs from by its bug."""
    assert [] == judge.verdict(recipe, roles)


@pytest.mark.parametrize("exhibit", CAUGHT)
def test_the_same_checks_catch_a_wrong_one(judge, exhibit):
    """Bugs of synchronous training: bits, replicas, messages, metrics, bytes."""
    roles, expected = CAUGHT[exhibit]
    assert expected == judge.verdict(exhibit, roles)


@pytest.mark.parametrize("recipe", ["as_it_should_be", "data_parallel"])
def test_ours_go_on_as_if_nobody_had_interrupted_them(judge, recipe):
    assert [] == judge.verdict_after_resume(recipe, RING)


@pytest.mark.parametrize("exhibit", RESUMED)
def test_the_same_checks_catch_a_wrong_resume(judge, exhibit):
    """Bugs 4 and 6."""
    assert RESUMED[exhibit] == judge.verdict_after_resume(exhibit, RING)


def test_every_exhibit_hangs_in_the_page_and_in_a_test():
    exhibits = {path.stem for path in (HERE / "exhibits").glob("bug_*.py")}
    tests = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert [] == [name for name in exhibits if name not in tests]
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    listed = {int(number) for row in rows for number in re.findall(r"\d+(?=[:,])", row.split(":")[0] + ":")}
    shown = {int(name.split("_")[1]) for name in exhibits}
    assert shown | {20} == listed  # 20 is 18 in another place
    for name in exhibits:
        text = (HERE / "exhibits" / f"{name}.py").read_text()
        assert re.match(rf'"""Bugs? {int(name.split("_")[1])}\b', text)
        assert "# the bug" in text
