"""How flat vectors are cut into buckets, and how the size of a bucket is found."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.runtime.parallel.gradients import bucket_tuning
from ttlaunch.runtime.parallel.gradients.bucket_tuning import (
    UNMEASURED,
    BucketTuner,
    candidates,
    largest_of_several,
)
from ttlaunch.runtime.parallel.gradients.buckets import cut_buckets

MEGABYTE = 10**6


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 2000))
def test_buckets_are_whole_parameters_from_the_last_to_the_first(sizes, bucket_bytes):
    starts = [0, *accumulate(sizes)]
    buckets = cut_buckets(starts, bucket_bytes=bucket_bytes)
    assert list(range(len(buckets))) == [bucket.index for bucket in buckets]
    assert list(range(starts[-1])) == [value for bucket in reversed(buckets) for value in bucket.values]
    assert list(range(len(sizes))) == [at for bucket in reversed(buckets) for at in bucket.parameters]
    for bucket in buckets:
        assert (starts[bucket.parameters.start], starts[bucket.parameters.stop]) == (
            bucket.values.start,
            bucket.values.stop,
        )
        assert 4 * len(bucket.values) <= bucket_bytes or len(bucket.parameters) == 1
    for bucket, before in pairwise(buckets):  # as few as possible
        assert 4 * (len(bucket.values) + sizes[before.parameters[-1]]) > bucket_bytes


def test_a_bucket_is_a_view_of_its_vector():
    bucket = cut_buckets([0, 2, 6], bucket_bytes=16)[0]
    vector_N = torch.zeros(6)
    bucket.of(vector_N).fill_(1)
    assert [0, 0, 1, 1, 1, 1] == vector_N.tolist()


@pytest.mark.parametrize("megabytes", [0.001, 0.5, 2.9])
def test_a_small_vector_is_one_bucket_and_nothing_is_tried(megabytes):
    tuner = BucketTuner(int(megabytes * MEGABYTE), bucket_megabytes=None)
    assert (int(megabytes * MEGABYTE), True) == (tuner.bucket_bytes, tuner.is_final)


def test_what_is_configured_is_not_tried():
    tuner = BucketTuner(500 * MEGABYTE, bucket_megabytes=0.25)
    assert (250_000, True) == (tuner.bucket_bytes, tuner.is_final)


@pytest.mark.parametrize(("megabytes", "begins"), [(2, 2), (96, 96), (97, 32), (500, 32)])
def test_where_no_time_passes_the_size_with_which_a_run_begins_stays(megabytes, begins):
    tuner = BucketTuner(megabytes * MEGABYTE, bucket_megabytes=UNMEASURED)
    assert (begins * MEGABYTE, True) == (tuner.bucket_bytes, tuner.is_final)
    assert tuner.bucket_bytes == BucketTuner(megabytes * MEGABYTE, bucket_megabytes=None).bucket_bytes


def test_candidates_are_the_whole_vector_and_few_sizes_that_cut_it():
    assert [12, 4, 2, 1] == [size // MEGABYTE for size in candidates(12 * MEGABYTE)]
    assert [96, 32, 16, 8] == [size // MEGABYTE for size in candidates(96 * MEGABYTE)]
    assert [2] == candidates(2)


def test_a_large_vector_is_never_one_bucket_because_whoever_adds_up_holds_it_for_each_worker():
    assert [32, 16, 8, 4] == [size // MEGABYTE for size in candidates(97 * MEGABYTE)]
    assert [32, 16, 8, 4] == [size // MEGABYTE for size in candidates(10**6 * MEGABYTE)]


def test_where_nobody_measures_a_bucket_is_the_largest_that_gives_several():
    assert [2, 4 * MEGABYTE, 32 * MEGABYTE, 32 * MEGABYTE] == [
        largest_of_several(size) for size in (2, 12 * MEGABYTE, 96 * MEGABYTE, 500 * MEGABYTE)
    ]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({12: 1.0, 1: 0.9, 2: 0.7, 4: 0.8}, 2),
        ({12: 1.0, 1: 1.5, 2: 0.99, 4: 1.1}, 12),  # the gain is noise
    ],
)
def test_the_size_with_the_fastest_steps_stays(monkeypatch, seconds, chosen):
    clock = [0.0]
    monkeypatch.setattr(bucket_tuning.time, "perf_counter", lambda: clock[0])
    tuner, tried = BucketTuner(12 * MEGABYTE, bucket_megabytes=None), []
    while not tuner.is_final:
        clock[0] += seconds[tuner.bucket_bytes // MEGABYTE] * (5 if len(tried) == 7 else 1)  # one step is an outlier
        tried.append(tuner.bucket_bytes // MEGABYTE)
        tuner.end_step()
    assert chosen * MEGABYTE == tuner.bucket_bytes
    assert [12, *[12, 4, 2, 1] * 4] == tried  # the first step is not counted
    tuner.end_step()
    assert chosen * MEGABYTE == tuner.bucket_bytes
