"""`--fits`: whether a plan fits, and the nearest change that does (E9)."""

import json
from dataclasses import replace

import pytest

from ttlaunch.app.fits import Fit, find_fit, needed_by_host, needed_bytes, parse_limit
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import LaunchError
from ttlaunch.running.metrics.prediction import PredictedRank, Prediction

MB = 10**6


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        ("100kB", 100_000),
        ("100KB", 100_000),
    ],
)
def test_a_size_has_a_number_and_a_unit(text, size):
    assert size == parse_limit(text)


@pytest.mark.parametrize("text", ["", "24", "GB", "-1GB", "1e9GB", "24 gigabytes", "9999999GB", "\x1b[2JGB", "24\nGB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(LaunchError, match="names no size") as refused:
        parse_limit(text)
    assert ["P009"] == [one.code for one in refused.value.diagnostics]


def predicted(*peaks, shared=0, **more):
    ranks = tuple(
        PredictedRank(rank, "worker", {}, peak, {}, {}, 0, extent=peak or 0, **{"left": (peak or 0) // 2, **more})
        for rank, peak in enumerate(peaks)
    )
    return Prediction(250 * MB, ranks, (), None, shared)


def test_a_plan_that_fits_needs_no_change():
    prediction = predicted(100 * MB, None)

    needed = needed_bytes(prediction)
    assert 361 * MB < needed < 364 * MB  # Python and messages, tables of pages, and by how much ranks differ
    assert Fit(needed, needed, (), needed) == find_fit(RunSpec("nonesuch"), {}, prediction, limit=needed)
    assert Fit(needed - 1, needed, None, needed) == find_fit(RunSpec("nonesuch"), {}, prediction, limit=needed - 1)


def test_a_rank_is_not_killed_for_pages_that_can_be_read_again():
    """Nor does a second rank, which may end at any time, make the first one smaller."""
    assert 100 * MB <= -more_than_plain(shared=100 * MB) <= 105 * MB
    two, five = (needed_bytes(predicted(*[100 * MB] * ranks, shared=100 * MB)) for ranks in (2, 5))
    assert two == five


def test_where_ranks_exchange_gradients_a_step_may_take_other_buckets_but_not_beside_the_last_checkpoint():
    alone, two = (needed_bytes(predicted(*[1000 * MB] * ranks)) for ranks in (1, 2))
    assert 5 * MB <= two - alone <= 5.1 * MB
    saving = {"saved": 1000 * MB, "saves_early": False}
    alone, two = (needed_bytes(predicted(*[1000 * MB] * ranks, **saving)) for ranks in (1, 2))
    assert alone == two


def more_than_plain(**more):
    return needed_bytes(predicted(100 * MB, **more)) - needed_bytes(predicted(100 * MB))


def test_holes_between_small_pieces_are_as_large_as_these():
    assert 3 * MB <= more_than_plain(small=3 * MB) <= 3.1 * MB


def test_what_libraries_keep_counts_by_rank():
    assert 4 * MB <= more_than_plain(workspaces=4 * MB) <= 4.1 * MB


def test_of_what_a_step_loads_only_what_is_no_file_counts_and_only_where_passes_are_made():
    def computing(**more):
        plain = predicted(100 * MB, **more)
        return needed_bytes(replace(plain, computing_bytes=20 * MB, computing_shared_bytes=18 * MB)) - needed_bytes(
            plain
        )

    assert 2 * MB <= computing() <= 2.1 * MB
    assert computing(makes_passes=False) == 0


def test_the_copy_for_a_checkpoint_counts_where_steps_follow():
    assert 30 * MB <= more_than_plain(saved=30 * MB) <= 32 * MB


def test_after_the_last_step_the_copy_has_room_where_large_activations_were():
    assert more_than_plain(saved=40 * MB, saves_early=False) == 0  # 50 MB are left, and 40 MB are no more than the peak
    assert 20 * MB <= more_than_plain(saved=70 * MB, saves_early=False) <= 21 * MB


def test_data_counts_and_so_does_its_preparation_if_it_takes_more_than_the_steps():
    plain = predicted(100 * MB)
    with_data = replace(plain, data_bytes=50 * MB, data_most_bytes=60 * MB)
    prepared = replace(with_data, data_most_bytes=500 * MB)

    assert 50 * MB <= needed_bytes(with_data) - needed_bytes(plain) <= 52 * MB
    assert 400 * MB <= needed_bytes(prepared) - needed_bytes(plain) <= 415 * MB


def test_ranks_of_a_host_need_the_pages_of_libraries_once():
    one, two = (predicted(*[100 * MB] * count, shared=80 * MB) for count in (1, 2))
    alone, together = needed_by_host(one, ["a"]), needed_by_host(two, ["a", "a"])

    assert needed_bytes(one) <= alone["a"] - 80 * MB  # its ranks keep freed memory, because no group limits them
    assert {"a": 2 * alone["a"] - 80 * MB} == together
    assert {"a": alone["a"], "b": alone["a"]} == needed_by_host(two, ["a", "b"])


@pytest.mark.slow
def test_the_nearest_change_is_one_that_keeps_the_bits(ttlaunch):
    """Activations of 64 sequences are much of it, so computing them again is enough."""
    large = "--set training_config.batch_size=128 --set training_config.micro_batch_size=64"
    answer = ttlaunch(f"plan data_parallel {large} --fits 240MB --format json")

    fit = json.loads(answer.stdout)["fits"]
    assert ["training_config.activation_checkpointing=true"] == fit["change"]
    assert fit["needed_with_change"] <= fit["limit"] < fit["needed"]
