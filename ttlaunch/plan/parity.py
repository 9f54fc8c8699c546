"""The matrix of `ttlaunch parity`: which small trainings have to end with the same bits, and the command of each.

A step is always the same 12 micro-batches of one sequence. Layouts, workers and accumulation only say who computes which of
them, so within a precision every cell has to end as the first one, which is one process.
"""

import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ttlaunch.diagnostics.count import counted

SEQUENCES = 12
"""Of a step: 2, 3 and 4 workers share them evenly, and 3 of them are no whole subtree of the reduction."""

PRECISIONS = ("fp32", "bf16", "fp16")
ACCUMULATIONS = (1, 3)
WORKERS = (1, 2, 3, 4)
RECIPES = ("hierarchical_parallel", "data_parallel", "pipeline_parallel")
_BLOCKS = {2: [2, 2], 3: [1, 2, 1], 4: [1, 1, 1, 1]}
_PAIRS, _REPLICAS = "tiers of pairs", "two pipelines"
_MODEL = "num_blocks: 4, num_heads: 2, embedding_dim: 16, max_sequence_length: 16, dropout_prob: 0.1"


@dataclass(frozen=True)
class Cell:
    """One small training.

    Attributes:
        layout: In words.
        workers: Ranks that differentiate.
        ranks: All of them.
        accumulation: Into how many accumulations the step's sequences are cut.
    """

    recipe: str
    layout: str
    workers: int
    ranks: int
    accumulation: int
    precision: str

    def __str__(self) -> str:
        return f"{self.layout}, {counted(self.ranks, 'rank')}, accumulation {self.accumulation}, {self.precision}"

    def words(self, *, steps: int) -> list[str]:
        """What follows `ttlaunch run` or `ttlaunch simulate`: nothing of the recipe's own training file is left."""
        training = (
            f"steps: {steps}, batch_size: {SEQUENCES // self.accumulation}, micro_batch_size: 1, "
            f"gradient_accumulation_steps: {self.accumulation}, learning_rate: 5.0e-3, "
            "validation_sequences: 4, validation_interval: 1000000"
        )
        training += f", precision: {self.precision}" if self.precision != PRECISIONS[0] else ""
        sections = {
            "training_config": training,
            "transformer_config": _MODEL,
            "scheduler_config": "type: cosine, warmup_steps: 5",
            "checkpoint_config": "interval: 1000000",  # the last step has one
            "multihost_config": self._multihost(),
            **({"device_config": "enable_ddp: true, mesh_shape: [1, 2]"} if self.layout == _PAIRS else {}),
        }
        words = [word for key, value in sections.items() for word in ("--set", f"{key}={{{value}}}")]
        sized = self.recipe == RECIPES[0]  # its layouts differ in the number of ranks; the others' last one is meant
        return [self.recipe, *(["--ranks", str(self.ranks)] if sized else []), *words]

    def command(self, *, steps: int, simulated: bool) -> str:
        """As it can be pasted into a shell."""
        return shlex.join(["ttlaunch", "simulate" if simulated else "run", *self.words(steps=steps)])

    def _multihost(self) -> str:
        if self.layout == _PAIRS:
            return f"num_workers: {self.workers // 2}"
        if self.layout == _REPLICAS:
            return f"pipeline_parallel_config: {{blocks_per_rank: {_BLOCKS[self.workers // 2]}, replicas: 2}}"
        if self.recipe == "pipeline_parallel":
            return f"pipeline_parallel_config: {{blocks_per_rank: {_BLOCKS[self.workers]}}}"
        return f"num_workers: {self.workers}"


def matrix(
    *,
    recipes: Collection[str] = RECIPES,
    ranks: Collection[int] = (),
    accumulations: Collection[int] = ACCUMULATIONS,
    precisions: Collection[str] = PRECISIONS,
) -> list[Cell]:
    """The cells of a run of `ttlaunch parity`, in order; the first one of each precision is its reference.

    Args:
        recipes: Whose layouts are tried; the reference is always one process.
        ranks: World sizes that are tried; empty: all that arise with 1 to 4 workers.
        accumulations: Divisors of `SEQUENCES`.
        precisions: Of `PRECISIONS`.
    """
    cells = []
    for precision in precisions:
        reference = Cell(RECIPES[0], "one process", 1, 1, min(accumulations), precision)
        others = [
            Cell(recipe, layout, workers, size, accumulation, precision)
            for recipe, layout, workers, size in _layouts()
            for accumulation in accumulations
            if recipe in recipes and (not ranks or size in ranks)
        ]
        cells += [reference, *(cell for cell in others if cell != reference)]
    return cells


def _layouts() -> Iterator[tuple[str, str, int, int]]:
    """Recipe, layout, workers and ranks."""
    yield RECIPES[0], "one process", 1, 1
    for workers in WORKERS:
        yield RECIPES[0], "two tiers", workers, workers + 1
    for workers in WORKERS:
        yield RECIPES[0], "three tiers", workers, workers + 2
    for workers in WORKERS:
        yield RECIPES[1], "data parallel", workers, workers
    for stages in _BLOCKS:
        yield RECIPES[2], "pipeline", stages, stages
    yield RECIPES[0], _PAIRS, 4, 5
    yield RECIPES[2], _REPLICAS, 4, 4


def world_sizes(recipes: Collection[str]) -> list[int]:
    """Of all layouts of some recipes, ascending."""
    return sorted({size for recipe, _, _, size in _layouts() if recipe in recipes})


def class_names(hashes: Collection[str]) -> dict[str, str]:
    """A letter for each different hash, in the order of their appearance: A to Z, then AA and so on."""
    return {text: _letters(number) for number, text in enumerate(dict.fromkeys(hashes))}


def _letters(number: int) -> str:
    more, last = divmod(number, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)
