"""No random edit of a shipped description is accepted in silence and means something wrong; the benchmark tries more."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COUNT = 20


@pytest.fixture
def mutation(monkeypatch):
    """The benchmark, which lies beside its own modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mutation  # noqa: PLC0415 - it can only be found now

    yield mutation
    for name in ("mutation", "mutation_edits", "mutation_kinds"):
        sys.modules.pop(name, None)


def test_of_twenty_edits_of_each_description_none_slips_through_and_none_raises(mutation, tmp_path):
    reader = mutation.Reader(tmp_path.resolve())
    tallies = [mutation.run(subject, count=COUNT, seed=1, reader=reader) for subject in mutation.subjects()]

    assert [] == [line for tally in tallies for line in [*tally.slipped, *tally.broken]]
    assert all(sum(tally.counts.values()) == COUNT for tally in tallies)
    assert all(tally.counts["refused"] > COUNT // 3 for tally in tallies)


def test_a_mutant_is_made_from_its_number_alone(mutation):
    subject = next(mutation.subjects())

    assert mutation.mutate(subject, 7, 0) == mutation.mutate(subject, 7, 0)
    assert mutation.mutate(subject, 7, 0) != mutation.mutate(subject, 8, 0)
