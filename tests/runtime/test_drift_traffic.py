"""TrafficCounter ÷ formula of the recipes whose workers drift apart: D6's ring, and averages every so many steps."""

import pytest

from .test_traffic import books, check_exact, small, start_of_run  # noqa: F401  fixtures and their helpers

WORKERS = [(2, 4), (3, 4), (4, 7)]


@pytest.mark.parametrize(("workers", "micro_batches"), WORKERS)
@pytest.mark.parametrize("bound", [0, 2])
def test_a_ring_with_a_bound_moves_what_it_says(books, workers, micro_batches, bound):  # noqa: F811
    """D6: with a bound 2(n - 1)/n of S out of each rank, and only to the next; also where shards are unequal."""
    config = small(micro_batches, 5, classic_dp_config={"staleness_bound": bound})
    recorded = books("classic_dp", ["worker"] * workers, config=config)
    check_exact(recorded, steps=5, validations=4)
    if bound:
        size, edges = 4 * recorded.telemetry[0].facts["values"], {}
        for edge in recorded.traffic.edges:
            if edge.operation == "gradients":
                edges[edge.source, edge.dest] = edge.size
        assert {(rank, (rank + 1) % workers) for rank in range(workers)} == set(edges)
        least = 5 * 2 * (workers - 1) / workers * size
        assert all(abs(sent - least) <= 5 * 2 * 4 for sent in edges.values())  # a value more or less in a shard


OWN = {"local_sgd": "local_sgd_config", "diloco": "diloco_config"}


@pytest.mark.parametrize(("workers", "micro_batches"), WORKERS)
@pytest.mark.parametrize(("recipe", "every"), [("local_sgd", 1), ("local_sgd", 3), ("diloco", 2), ("diloco", 9)])
def test_averages_move_what_they_say(books, recipe, workers, micro_batches, every):  # noqa: F811
    """Weights once in so many steps and after the last: bytes ÷ H."""
    recorded = books(recipe, ["worker"] * workers, config=small(micro_batches, 5, **{OWN[recipe]: {"every": every}}))
    check_exact(recorded, steps=5, validations=4)
    averages = {1: 5, 2: 3, 3: 2, 9: 1}[every]  # the last one after step 5, whether or not H divides it
    size = 4 * recorded.telemetry[0].facts["values"]
    sent = sum(edge.size for edge in recorded.traffic.edges if edge.operation == "weights" and edge.source == 0)
    assert abs(averages * 2 * (workers - 1) / workers * size - sent) <= averages * 2 * 4 * workers


@pytest.mark.parametrize(("recipe", "every", "kind"), [("local_sgd", 3, "int8"), ("diloco", 2, "powersgd")])
def test_averages_through_a_codec_move_what_they_say(books, recipe, every, kind):  # noqa: F811
    """D8: a payload to every other worker in so many steps, and no weights."""
    config = small(4, 5, compression_config={"kind": kind}, **{OWN[recipe]: {"every": every}})
    recorded = books(recipe, ["worker"] * 3, config=config)
    check_exact(recorded, steps=5, validations=4)
    assert {"differences", "counts", "all_gather"} == {edge.operation for edge in recorded.traffic.edges}
    size = 4 * recorded.telemetry[0].facts["values"]
    sent = {edge.size / edge.messages for edge in recorded.traffic.edges if edge.operation == "differences"}
    assert 1 == len(sent)
    assert kind != "int8" or 3.9 < size / sent.pop() < 4


def test_local_steps_move_fewer_bytes_than_the_parent_by_the_number_of_steps(books):  # noqa: F811
    """8 steps: with an average after 4 of them a quarter of what `data_parallel` moves, and of what every step costs."""

    def moved(recipe, **sections):
        recorded = books(recipe, ["worker"] * 2, config=small(4, 8, **sections))
        check_exact(recorded, steps=8, validations=5)
        return sum(edge.size for edge in recorded.traffic.edges if edge.operation in {"weights", "gradients"})

    parent = moved("data_parallel")
    assert parent == 4 * moved("local_sgd", local_sgd_config={"every": 4})
    assert parent == moved("local_sgd", local_sgd_config={"every": 1})
    assert parent == 8 * moved("diloco", diloco_config={"every": 8})


def test_gradients_of_sgd_are_averaged_in_every_step_as_the_parent_does(books):  # noqa: F811
    config = small(7, 3, local_sgd_config={"every": 1})
    config["training_config"] |= {"optimizer": "sgd"}
    recorded = books("local_sgd", ["worker"] * 3, config=config)
    check_exact(recorded)
    assert {"gradients", "counts", "bucket_size", "all_gather"} == {edge.operation for edge in recorded.traffic.edges}
    recorded = books("local_sgd", ["worker"] * 3, config=config | {"compression_config": {"kind": "int8"}})
    check_exact(recorded)
    assert {"gradients", "counts", "all_gather"} == {edge.operation for edge in recorded.traffic.edges}


@pytest.mark.parametrize("began", [2, 3, 4])
@pytest.mark.parametrize(
    ("recipe", "section"),
    [
        ("classic_dp", {"classic_dp_config": {"staleness_bound": 2}}),
        ("local_sgd", {"local_sgd_config": {"every": 3}}),
        ("diloco", {"diloco_config": {"every": 2}}),
    ],
    ids=["classic_dp", "local_sgd", "diloco"],
)
def test_a_resumed_run_moves_what_it_says(books, start_of_run, recipe, section, began):  # noqa: F811
    config = small(4, 6, checkpoint_config={"interval": 1, "keep": 9}, **section)
    start = start_of_run(recipe, ["worker"] * 3, config, step=began)
    resumed = books(recipe, ["worker"] * 3, config=config, start=start)
    check_exact(resumed, steps=6 - began, validations={2: 3, 3: 3, 4: 2}[began])


@pytest.mark.parametrize(
    ("recipe", "section"),
    [
        ("classic_dp", {"classic_dp_config": {"staleness_bound": 2}}),
        ("local_sgd", {"local_sgd_config": {"every": 3}}),
        ("diloco", {"diloco_config": {"every": 40}}),
    ],
    ids=["classic_dp", "local_sgd", "diloco"],
)
def test_a_run_that_ends_early_moves_what_it_says(books, recipe, section):  # noqa: F811
    config = small(4, 40, **section)
    config["training_config"] |= {"early_stop_patience": 1, "learning_rate": 1e-9, "early_stop_min_delta": 1.0}
    traffic = books(recipe, ["worker"] * 3, config=config).traffic
    assert (None, (), 2) == (traffic.reason, traffic.differing, traffic.validations)
    assert 1 < traffic.steps < 40
    assert [] == [edge for edge in traffic.edges if edge.size != edge.expected]
