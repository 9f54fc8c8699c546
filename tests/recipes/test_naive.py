"""The naive form of every recipe trains to what its fast form trains to, in one process; and it is short enough to read."""

import ast

import pytest

from tests.runtime.layouts import RECIPES, train_recipe
from ttlaunch import contract
from ttlaunch.runtime.parallel.staleness.ring import RingBuffers

SMALL = {
    "training_config": {"steps": 4, "batch_size": 5, "micro_batch_size": 1, "validation_sequences": 3}
    | {"validation_interval": 1000, "use_clip_grad_norm": True, "clip_grad_norm_max_norm": 0.5},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
    | {"dropout_prob": 0.1},
    "scheduler_config": {"type": "cosine", "warmup_steps": 2},
    "checkpoint_config": {"interval": None},
}
SGD = {"training_config": {"optimizer": "sgd", "learning_rate": 0.05}}
TIED = {"transformer_config": {"tie_embeddings": True}}
PIPELINE = {
    "multihost_config": {"pipeline_parallel_config": {"blocks_per_rank": [1, 1, 1]}},
    "transformer_config": {"num_blocks": 3},
}

SAME_BITS = [
    ("data_parallel", {"worker": 3}, {}),
    ("data_parallel", {"worker": 2}, SGD | TIED),
    ("local_sgd", {"worker": 3}, {"local_sgd_config": {"every": 2}}),
    ("local_sgd", {"worker": 2}, {"local_sgd_config": {"every": 1}}),
    ("diloco", {"worker": 3}, {"diloco_config": {"every": 2, "outer_momentum": 0.9}}),
    ("diloco", {"worker": 2}, {"diloco_config": {"every": 2}} | SGD | TIED),
    ("hierarchical_parallel", {"worker": 3, "aggregator": 1, "optimizer": 1}, TIED),
    ("sync_ps", {"worker": 3, "server": 1}, {"sync_ps_config": {"polyak_interval": 2}}),
    ("sync_ps", {"worker": 2, "server": 1}, SGD | TIED),
    ("pipeline_parallel", {"stage": 3}, PIPELINE),
    ("zero", {"worker": 3}, {}),
    ("zero", {"worker": 2}, {"zero_config": {"stage": 1}} | SGD),
    ("classic_dp", {"worker": 3}, {"classic_dp_config": {"staleness_bound": 0}}),
    ("tensor_parallel", {"worker": 2}, {"tensor_parallel_config": {"ranks": 2}} | TIED),
    (
        "tensor_parallel",
        {"worker": 4},
        {"tensor_parallel_config": {"ranks": 4}, "transformer_config": {"num_heads": 4}},
    ),
]


def merged(*configs):
    """The configurations on top of each other, section by section."""
    sections = {name for config in configs for name in config}
    return {name: {k: v for one in configs for k, v in one.get(name, {}).items()} for name in sections}


@pytest.fixture
def both(tmp_path):
    """`both(recipe, roles, config)`: the runs of its naive and of its fast form; `naive` has its roles if they differ."""

    def train(recipe, roles, config, *, naive=None, **world):
        found = []
        for trainer, counts in (("naive", naive or roles), ("trainer", roles)):
            ranks = [role for role, count in counts.items() for _ in range(count)]
            folder = tmp_path / trainer
            found.append(
                train_recipe(recipe, ranks, folder, merged(SMALL, config), data=None, trainer=trainer, **world)
            )
        return found

    return train


@pytest.mark.parametrize("case", SAME_BITS, ids=lambda case: case[0])
def test_a_naive_form_has_the_bits_of_its_recipe(both, case):
    recipe, roles, config = case
    naive, fast = both(recipe, roles, config)
    assert naive.sha256 == fast.sha256
    steps = list(range(1, 5))
    assert steps == sorted({record["step"] for record in naive.records(contract.KIND_STEP)})


@pytest.mark.parametrize("order", [[1, 1, 2, 0], [2, 0, 1, 2]])
def test_the_naive_asynchronous_server_has_the_bits_of_its_recipe_in_the_same_order_of_arrivals(both, order):
    """The fast form waits for each answer too; which gradient was how old is then decided by the order alone."""
    config = {"elastic_dp_config": {"is_ahead": False}, "multihost_config": {"num_workers": 3}}
    naive, fast = both("elastic_dp", {"worker": 3, "server": 1}, config, replay=tuple(order))
    assert naive.sha256 == fast.sha256
    for key in ("arrived_from", "staleness", "grad_norm", "learning_rate"):
        assert naive.by_step(contract.KIND_STEP, key) == fast.by_step(contract.KIND_STEP, key)
    assert order == list(naive.by_step(contract.KIND_STEP, "arrived_from").values())


@pytest.mark.parametrize("sizes", [(2, 1), (3, 2)], ids=str)
def test_naive_bounded_staleness_is_its_recipe_where_every_mean_arrives_as_late_as_the_bound_allows(
    both, monkeypatch, sizes
):
    """Up to rounding: the fast form adds along the ring, the naive one along the tree over micro-batches."""
    workers, bound = sizes
    advance = RingBuffers.advance
    monkeypatch.setattr(RingBuffers, "advance", lambda ring, *, waits: waits and advance(ring, waits=True))
    last = 12
    config = {"classic_dp_config": {"staleness_bound": bound}, "training_config": {"steps": last}}
    naive, fast = both("classic_dp", {"worker": workers}, config)
    assert bound == fast.result("staleness maximum")
    losses, applied = (run.by_step(contract.KIND_STEP, "loss") for run in (naive, fast))
    late = {step + bound: losses[step] for step in range(1, last - bound)}  # reported when its mean is applied
    at_the_end = [losses[step] for step in range(last - bound, last + 1)]
    assert applied == pytest.approx(late | {last: sum(at_the_end) / len(at_the_end)}, rel=1e-5)
    assert losses[last] < losses[1]


@pytest.mark.parametrize("config", [{}, SGD], ids=["adamw", "sgd"])
def test_naive_sharding_has_the_losses_of_one_process_up_to_rounding(both, config):
    """The naive form of `fully_sharded` keeps the README's tolerance; `tests/mpi` compares it with torch's own sharding."""
    naive, alone = both("fully_sharded", {"trainer": 1}, config, naive={"worker": 3})
    for key in ("loss", "grad_norm", "learning_rate", "tokens"):
        expected = alone.by_step(contract.KIND_STEP, key)
        assert naive.by_step(contract.KIND_STEP, key) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/naive.py")), ids=lambda path: path.parent.name)
def test_a_naive_form_is_at_most_60_lines_and_saves_nothing(path):
    """Lines without blanks, comments and docstrings; it imports what trainers import, and saves nothing."""
    text = path.read_text()
    assert len(text.splitlines()) <= 100
    assert lines_of_code(text) <= 60
    tree = ast.parse(text)
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert {module for module in modules if module.startswith("ttlaunch")} <= {"ttlaunch", "ttlaunch.train"}
    assert not {"checkpoint", "restore"} & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def lines_of_code(text):
    """The lines that hold a token of the program and no docstring."""
    tree = ast.parse(text)
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = text.splitlines()
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and at not in docstrings
        for at, line in enumerate(lines, start=1)
    )


def test_every_recipe_but_those_that_train_nothing_has_a_naive_form():
    with_naive = {path.parent.name for path in RECIPES.glob("*/naive.py")}
    assert {path.parent.name for path in RECIPES.glob("*/recipe.py")} - with_naive == {"fabric_minimal", "serve"}
