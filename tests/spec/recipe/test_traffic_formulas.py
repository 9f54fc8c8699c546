"""The closed formulas of traffic against messages that are written down one by one."""

from collections import Counter

import pytest

from ttlaunch.recipe import TrainingFile
from ttlaunch.spec.recipe.blocks import contiguous_blocks
from ttlaunch.spec.recipe.collective_traffic import (
    all_gather_bytes,
    all_reduce_bytes,
    averaging_traffic,
    distributed_data_parallel_traffic,
    process_group_traffic,
    ring_all_reduce_bytes,
    validation_traffic,
)
from ttlaunch.spec.recipe.compression import compressed_averaging_traffic, payload_bytes
from ttlaunch.spec.recipe.sections import CompressionConfig
from ttlaunch.spec.recipe.tensor_split import split_model_traffic
from ttlaunch.spec.recipe.traffic import Ranks, Traffic, agreed_buckets, agreed_scale, agreed_stop, sequences_of_blocks

AMONG = [4, 7, 9]


def added(messages):
    """Bytes by source and destination, of those that move any."""
    found = Counter()
    for source, dest, size in messages:
        found[source, dest] += size
    return +found


@pytest.mark.parametrize("values", [0, 2, 3, 10])
@pytest.mark.parametrize("among", [[4], [4, 7], AMONG, [0, 1, 2, 3, 4]], ids=len)
def test_a_ring_sends_each_shard_to_the_next_rank_in_every_round(among, values):
    count, messages = len(among), []
    sizes = [4 * len(block) for block in contiguous_blocks(values, count)]
    for turn in range(count - 1):
        for place, source in enumerate(among):
            after = among[(place + 1) % count]
            messages.append((source, after, sizes[(place - turn) % count]))  # sums on their way to their owner
            messages.append((source, after, sizes[(place + 1 - turn) % count]))  # sums on their way to everybody
    assert added(messages) == added(ring_all_reduce_bytes(among, values, value_bytes=4))


def test_shards_are_sent_to_their_owners_and_back():
    assert {(4, 7): 24, (4, 9): 24, (7, 4): 16, (7, 9): 16, (9, 4): 16, (9, 7): 16} == added(
        all_gather_bytes(AMONG, 7, value_bytes=8)
    )
    # Owners have 3, 2 and 2 values; each rank sends an owner its shard, once for each sum, and every rank its own shard.
    assert {(4, 7): 5, (4, 9): 5, (7, 4): 5, (7, 9): 4, (9, 4): 5, (9, 7): 4} == added(
        all_reduce_bytes(AMONG, 7, value_bytes=1)
    )
    assert {(4, 7): 7, (4, 9): 7, (7, 4): 5, (7, 9): 4, (9, 4): 11, (9, 7): 8} == added(
        all_reduce_bytes(AMONG, 7, value_bytes=1, sums=[2, 1, 3])
    )
    assert [Traffic("all_gather", 4, 7, per_validation=16), Traffic("all_gather", 7, 4, per_validation=8)] == (
        validation_traffic([4, 7], 3)
    )


def test_torchs_ring_is_as_large_as_the_least_and_is_not_measured():
    found = distributed_data_parallel_traffic([0, 1, 2], 30, has_group=True)
    # The loss and the tokens are one number each, and ranks 0 and 1 own them.
    sums = {(0, 1): 16, (0, 2): 8, (1, 0): 16, (1, 2): 8, (2, 0): 8, (2, 1): 8}
    assert sums == {(one.source, one.dest): one.per_step for one in found if one.operation == "all_reduce"}
    ring = [Traffic("gradients (torch)", *pair, per_step=160, is_measured=False) for pair in ((0, 1), (1, 2), (2, 0))]
    assert ring == [one for one in found if one.operation != "all_reduce"]
    assert [] == distributed_data_parallel_traffic([0], 30, has_group=True)
    with_group = distributed_data_parallel_traffic([0, 1, 2], 30, has_group=False)
    assert [*found, *process_group_traffic([0, 1, 2])] == with_group


def test_a_process_group_is_greeted_along_a_tree():
    pairs = [(one.source, one.dest, one.once) for one in process_group_traffic([0, 1, 2, 3, 4])]
    up = [(rank, 0, 256) for rank in (1, 2, 3, 4)]
    assert [*up, (0, 1, 256), (0, 2, 256), (1, 3, 256), (0, 4, 256)] == pairs


def test_weights_are_averaged_every_so_many_steps_or_gradients_in_each():
    cfg = TrainingFile.model_validate({"training_config": {"batch_size": 4, "micro_batch_size": 1}})
    assert [
        Traffic("weights", 4, 7, per_step=12, every=3),
        Traffic("counts", 4, 7, per_step=16, every=3),
        Traffic("weights", 7, 4, per_step=12, every=3),
        Traffic("counts", 7, 4, per_step=16, every=3),
    ] == averaging_traffic(cfg, [4, 7], 12, every=3)
    sgd = TrainingFile.model_validate(
        {"training_config": {"batch_size": 4, "micro_batch_size": 1, "optimizer": "sgd", "beta1": 0.0}}
    )
    assert [
        agreed_buckets(4, 7),
        Traffic("gradients", 4, 7, per_step=12),
        Traffic("counts", 4, 7, per_step=16),
        Traffic("gradients", 7, 4, per_step=12),
        Traffic("counts", 7, 4, per_step=16),
    ] == averaging_traffic(sgd, [4, 7], 12, every=1)
    assert Traffic("bucket_size", 4, 7, in_first_step=16, slack=320) == agreed_buckets(4, 7)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"kind": "none"}, 400),
        ({"kind": "bf16"}, 200),
        ({"kind": "int8", "block_size": 30}, 116),
        ({"kind": "top_k", "k": 0.29}, 232),
        ({"kind": "powersgd", "rank": 2}, 4 * (2 * 10 + 100 - 24)),
    ],
)
def test_a_payload_has_so_many_bytes(settings, size):
    assert size == payload_bytes(CompressionConfig(**settings), 100, sides=10, factored=24)


def test_payloads_go_to_every_other_worker_every_so_many_steps():
    class Config(TrainingFile):
        compression_config: CompressionConfig = CompressionConfig(kind="powersgd", rank=2)

    facts = [{"values": 100, "factored_sides": 10, "factored_values": 24}, {"values": 50}]
    found = compressed_averaging_traffic(Config(), [0, 1], Ranks(["worker"] * 2, facts), every=5)
    assert [
        Traffic("differences", 0, 1, per_step=384, every=5),
        Traffic("counts", 0, 1, per_step=16, every=5),
        Traffic("differences", 1, 0, per_step=200, every=5),
        Traffic("counts", 1, 0, per_step=16, every=5),
    ] == found


def test_ranks_are_found_by_role_and_say_their_sizes():
    ranks = Ranks(
        ["worker", "server", "worker", "watcher"],
        [
            {"values": 10, "tensors": 3, "owned": 5, "validation_micro_batches": 7, "validation_sequences": 9},
            {"values": 2},
        ],
    )
    assert ([0, 2], [0, 1, 2], [], 1) == (
        ranks.of("worker"),
        ranks.of("server", "worker"),
        ranks.of("trainer"),
        ranks.sole("server", "trainer"),
    )
    assert (40, 3, 5, 7, 9) == (
        *(ranks.weight_bytes(0), ranks.tensors(0), ranks.fact(0, "owned")),
        *(ranks.validation_micro_batches, ranks.validation_sequences),
    )
    for roles, count in ((("worker", "server"), 3), (("trainer",), 0)):
        with pytest.raises(LookupError, match=f"^{count} ranks have a role of {', '.join(roles)}, expected 1$"):
            ranks.sole(*roles)
    for unsaid in (
        lambda: ranks.tensors(1),
        lambda: ranks.fact(0, "other"),
        lambda: Ranks([], [{}]).validation_sequences,
    ):
        with pytest.raises(LookupError):
            unsaid()


def test_what_is_agreed_on_is_three_numbers_where_it_may_change():
    plain = TrainingFile()
    changing = TrainingFile.model_validate({"training_config": {"precision": "fp16", "early_stop_patience": 2}})
    assert ([], []) == (agreed_scale(plain, 1, 2), agreed_stop(plain, 1, 2))
    assert [Traffic("loss_scale", 1, 2, per_step=24, once=24)] == agreed_scale(changing, 1, 2)
    assert [Traffic("early_stop", 1, 2, per_validation=24)] == agreed_stop(changing, 1, 2)


def test_sequences_of_blocks_are_those_that_their_micro_batches_have():
    assert [[4, 2, 1], [4, 4], [2, 0, 0], []] == [
        sequences_of_blocks(7, 2, 3),
        sequences_of_blocks(8, 2, 2),
        sequences_of_blocks(2, 4, 3),
        sequences_of_blocks(5, 1, 0),
    ]


@pytest.mark.parametrize(
    ("kind", "checkpointing", "passes", "layers"),
    [("gpt", False, 1, 2 * 3), ("gpt", True, 2, 2 * 3), ("llama", False, 1, 2 * 3), ("mlp", False, 1, 3)],
)
def test_partial_sums_travel_for_each_layer_and_gradients_come_back(kind, checkpointing, passes, layers):
    """7 sequences in micro-batches of 2 for two replicas: the second has 2 + 1; of 3 for a validation the second has 1."""
    cfg = TrainingFile.model_validate(
        {
            "training_config": {"batch_size": 7, "micro_batch_size": 2, "model_type": kind}
            | {"activation_checkpointing": checkpointing},
            "transformer_config": {"num_blocks": 3, "max_sequence_length": 4, "embedding_dim": 8},
        }
    )
    ranks = Ranks(["worker"] * 4, [{"validation_sequences": 3}] * 4)
    found = split_model_traffic(cfg, ranks, [2, 3], replica=1, replicas=2)
    each = 4 * 4 * 8  # bytes of a sequence in the residual stream; two ranks exchange half of it, twice
    sent = {
        name: sum(one.per_step or one.per_validation for one in found if (one.operation, one.source) == name)
        for name in (("partial_sums", 2), ("input_gradients", 2))
    }
    forward = layers * passes * 3 * each + layers * 1 * each
    assert {("partial_sums", 2): forward, ("input_gradients", 2): layers * 3 * each} == sent
    assert layers * 1 * each == sum(one.per_validation for one in found if one.source == 2)
    assert {("partial_sums", 2, 3), ("partial_sums", 3, 2), ("input_gradients", 2, 3), ("input_gradients", 3, 2)} == {
        (one.operation, one.source, one.dest) for one in found
    }
