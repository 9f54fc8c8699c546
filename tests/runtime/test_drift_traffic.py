"""Ledger ÷ formula of the recipes whose workers drift apart: D6's ring, and averages every so many steps."""

import pytest

from .test_traffic import books, check_exact, small  # noqa: F401  a fixture and its helpers

WORKERS = [(2, 4), (3, 4), (4, 7)]


@pytest.mark.parametrize(("workers", "micro_batches"), WORKERS)
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_ring_with_a_bound_moves_what_it_says(books, workers, micro_batches, bound):  # noqa: F811
    """D6: with a bound 2(n - 1)/n of S out of each rank, and only to the next; also where shards are unequal."""
    config = small(micro_batches, 5, classic_dp_config={"staleness_bound": bound})
    recorded = books("classic_dp", ["worker"] * workers, config=config)
    check_exact(recorded, steps=5, validations=4)
    if bound:
        size, edges = 4 * recorded.books[0].facts["values"], {}
        for edge in recorded.traffic.edges:
            if edge.operation == "gradients":
                edges[edge.source, edge.dest] = edge.size
        assert {(rank, (rank + 1) % workers) for rank in range(workers)} == set(edges)
        least = 5 * 2 * (workers - 1) / workers * size
        assert all(abs(sent - least) <= 5 * 2 * 4 for sent in edges.values())  # a value more or less in a shard
