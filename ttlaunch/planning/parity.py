"""The matrix of `ttlaunch parity`: the small trainings that must end with the same bits, and the command of each.

Each step has the same 12 micro-batches of one sequence. Layouts, workers and accumulation only decide which rank computes
which micro-batch, so all cells of one precision must end with the bits of the first cell, which is one process.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ttlaunch.diagnostics.count import counted

SEQUENCES = 12
"""Sequences of a step. 2, 3 and 4 workers share them evenly, and the 3 of each of 4 workers are no complete subtree of the reduction."""

PRECISIONS = ("fp32", "bf16", "fp16")
ACCUMULATIONS = (1, 3)
WORKERS = (1, 2, 3, 4)
_BLOCKS = {2: [2, 2], 3: [1, 2, 1], 4: [1, 1, 1, 1]}
_SIZES = "num_blocks: 4, embedding_dim: 16, max_sequence_length: 16, dropout_prob: 0.1"
_MODELS = MappingProxyType(
    {"gpt": f"{_SIZES}, num_heads: 2", "llama": f"{_SIZES}, num_heads: 4, num_kv_heads: 2, mlp_dim: 24"}
)
MODELS = tuple(_MODELS)
"""Kinds of models that can be trained; the first one is tried unless another is asked for."""


class _Form(NamedTuple):
    """A layout in which a recipe divides the work.

    Attributes:
        layout: The layout, as text.
        workers: The numbers of ranks that compute gradients; parity tries each of them.
        sections: The sections of a training file that select it; `{count}` stands for the number of workers or stages, and
            `{blocks}` for the blocks of each stage.
        each: The number of ranks in each worker, or the number of parallel pipelines.
        others: The number of ranks that compute no gradients.
        is_sized: Whether `--ranks` selects the layout, because another layout of the recipe has the same configuration.
    """

    recipe: str
    layout: str
    workers: Collection[int]
    sections: Mapping[str, str] = MappingProxyType({})
    each: int = 1
    others: int = 0
    is_sized: bool = False


_STAGES = MappingProxyType({"multihost_config": "pipeline_parallel_config: {{blocks_per_rank: {blocks}}}"})
_TWO_PIPELINES = MappingProxyType(
    {"multihost_config": "pipeline_parallel_config: {{blocks_per_rank: {blocks}, replicas: 2}}"}
)
_PAIRS = MappingProxyType({"device_config": "enable_ddp: true, mesh_shape: [1, 2]"})
_FORMS = (
    _Form("hierarchical_parallel", "one process", (1,), is_sized=True),
    _Form("hierarchical_parallel", "two tiers", WORKERS, others=1, is_sized=True),
    _Form("hierarchical_parallel", "three tiers", WORKERS, others=2, is_sized=True),
    _Form("data_parallel", "data parallel", WORKERS),
    _Form("pipeline_parallel", "pipeline", tuple(_BLOCKS), _STAGES),
    _Form("hierarchical_parallel", "tiers of pairs", (4,), _PAIRS, each=2, others=1, is_sized=True),
    _Form("pipeline_parallel", "two pipelines", (4,), _TWO_PIPELINES, each=2),
    _Form("zero", "ZeRO 1", (3,), {"zero_config": "stage: 1"}),
    _Form("zero", "ZeRO 2", (4,), {"zero_config": "stage: 2"}),
    _Form("zero", "ZeRO 3", (2, 3, 4), {"zero_config": "stage: 3"}),
    _Form("sync_ps", "one server", (3,), {"sync_ps_config": "num_servers: 1"}, others=1),
    _Form("sync_ps", "two servers", (2,), {"sync_ps_config": "num_servers: 2"}, others=2),
    _Form("classic_dp", "never stale", (4,), {"classic_dp_config": "staleness_bound: 0"}),
)
"""All layouts; the first one is the reference."""

RECIPES = tuple(dict.fromkeys(form.recipe for form in _FORMS))


@dataclass(frozen=True)
class Cell:
    """One small training.

    Attributes:
        layout: The layout, as text.
        workers: The number of ranks that compute gradients.
        ranks: The number of all ranks.
        accumulation: The number of parts into which the sequences of a step are divided.
        model: One of `MODELS`.
    """

    recipe: str
    layout: str
    workers: int
    ranks: int
    accumulation: int
    precision: str
    model: str = MODELS[0]

    def __str__(self) -> str:
        kind = "" if self.model == MODELS[0] else f"{self.model}, "
        return f"{kind}{self.layout}, {counted(self.ranks, 'rank')}, accumulation {self.accumulation}, {self.precision}"

    def overrides(self, *, steps: int) -> list[str]:
        """Return the values of `--set`: whole sections, which replace those of the recipe's own file."""
        training = (
            f"steps: {steps}, batch_size: {SEQUENCES // self.accumulation}, micro_batch_size: 1, "
            f"gradient_accumulation_steps: {self.accumulation}, learning_rate: 5.0e-3, "
            "validation_sequences: 4, validation_interval: 1000000"
        )
        training += f", precision: {self.precision}" if self.precision != PRECISIONS[0] else ""
        training += f", model_type: {self.model}" if self.model != MODELS[0] else ""
        sections = {
            "training_config": training,
            "transformer_config": _MODELS[self.model],
            "scheduler_config": "type: cosine, warmup_steps: 5",
            "checkpoint_config": "interval: 1000000",  # so only the last step writes one
            "multihost_config": "num_workers: {count}",
            **self._form.sections,
        }
        count = self.workers // self._form.each
        blocks = _BLOCKS.get(count)
        return [f"{key}={{{value.format(count=count, blocks=blocks)}}}" for key, value in sections.items()]

    @property
    def world_size(self) -> int | None:
        """Return the value of `--ranks`; None if the configuration fixes the number of ranks."""
        return self.ranks if self._form.is_sized else None

    @property
    def _form(self) -> _Form:
        [form] = [form for form in _FORMS if (form.recipe, form.layout) == (self.recipe, self.layout)]
        return form

    def arguments(self, *, steps: int) -> list[str]:
        """Return the arguments of `ttlaunch run` or `ttlaunch simulate`."""
        size = [] if self.world_size is None else ["--ranks", str(self.world_size)]
        return [self.recipe, *size, *(word for one in self.overrides(steps=steps) for word in ("--set", one))]

    def command(self, *, steps: int, simulated: bool) -> str:
        """Return the command as it can be pasted into a shell."""
        return shlex.join(["ttlaunch", "simulate" if simulated else "run", *self.arguments(steps=steps)])


def matrix(
    *,
    recipes: Collection[str] = RECIPES,
    ranks: Collection[int] = (),
    accumulations: Collection[int] = ACCUMULATIONS,
    precisions: Collection[str] = PRECISIONS,
    model: str = MODELS[0],
) -> list[Cell]:
    """Return the cells of a run of `ttlaunch parity`, in order; the first one of each precision is its reference.

    Args:
        recipes: The recipes whose layouts are tried; the reference is always one process.
        ranks: The world sizes to try; if empty, all that 1 to 4 workers give.
        accumulations: Divisors of `SEQUENCES`.
        precisions: Some of `PRECISIONS`.
        model: One of `MODELS`.
    """
    cells = []
    for precision in precisions:
        reference = Cell(RECIPES[0], "one process", 1, 1, min(accumulations), precision, model)
        others = [
            Cell(recipe, layout, workers, size, accumulation, precision, model)
            for recipe, layout, workers, size in _layouts()
            for accumulation in accumulations
            if recipe in recipes and (not ranks or size in ranks)
        ]
        cells += [reference, *(cell for cell in others if cell != reference)]
    return cells


def _layouts() -> Iterator[tuple[str, str, int, int]]:
    """Yield recipe, layout, workers and ranks."""
    for form in _FORMS:
        for workers in form.workers:
            yield form.recipe, form.layout, workers, workers + form.others


def world_sizes(recipes: Collection[str]) -> list[int]:
    """Return the numbers of ranks of all layouts of some recipes, ascending."""
    return sorted({size for recipe, _, _, size in _layouts() if recipe in recipes})


def class_names(hashes: Collection[str]) -> dict[str, str]:
    """Give each distinct hash a letter, in the order in which they first occur: A to Z, then AA and so on."""
    return {text: _letters(number) for number, text in enumerate(dict.fromkeys(hashes))}


def _letters(number: int) -> str:
    more, last = divmod(number, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)
