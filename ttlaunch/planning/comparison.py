"""The runs of `ttlaunch compare`: the recipes, and the model, data and seed that all of them share."""

import re
from dataclasses import dataclass

_COMMA_BEFORE_KEY = re.compile(r",(?=[a-z_][a-z0-9_.]*=)")
_NAME = re.compile(r"[a-z_][a-z0-9_.]*=")


@dataclass(frozen=True)
class Workload:
    """The training that all candidates do: a small GPT, so that a comparison of all recipes takes minutes on two cores.

    Attributes:
        steps: Optimizer steps of each run.
        overrides: `KEY=VALUE`, for every recipe; they take precedence over the workload's own values.
    """

    steps: int
    overrides: tuple[str, ...] = ()

    @property
    def sets_steps(self) -> bool:
        """Return whether an override sets the number of steps, so that `steps` has no effect."""
        return any(one.partition("=")[0].strip() == "training_config.steps" for one in self.overrides)

    def settings(self) -> list[str]:
        """Return the values of `--set`: whole sections, which replace a recipe's own, then the overrides of keys."""
        training = (
            f"{{seed: 0, steps: {self.steps}, batch_size: 16, micro_batch_size: 2, learning_rate: 5.0e-3, "
            f"validation_interval: {max(1000, self.steps)}, validation_sequences: 32}}"
        )
        model = "{num_blocks: 4, num_heads: 4, embedding_dim: 64, max_sequence_length: 64, dropout_prob: 0.0}"
        return [
            f"training_config={training}",
            f"transformer_config={model}",
            f"scheduler_config={{type: cosine, warmup_steps: {min(10, self.steps)}}}",
            "checkpoint_config={interval: null}",
            *self.overrides,
        ]


@dataclass(frozen=True)
class Candidate:
    """One of the recipes that are compared, with its overrides.

    Attributes:
        recipe: A recipe's name or folder.
        overrides: `KEY=VALUE`, for this candidate alone.
    """

    recipe: str
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the name in the table, with keys without their section: `zero (zero_stage=3)`."""
        changes = ", ".join(_without_section(one) for one in self.overrides)
        return f"{self.recipe} ({changes})" if changes else self.recipe

    def arguments(self, workload: Workload, *, on: str) -> list[str]:
        """Return the arguments of `ttlaunch run`."""
        cluster = [] if on == "local" else ["--on", on]
        return [self.recipe, *cluster, *(word for one in self.settings(workload) for word in ("--set", one))]

    def settings(self, workload: Workload) -> list[str]:
        """Return the values of `--set`: those of the workload, then the overrides of this candidate."""
        return [*workload.settings(), *self.overrides]


def _without_section(override: str) -> str:
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def parse_candidate(text: str) -> Candidate:
    """Parse `RECIPE`, or `RECIPE:KEY=VALUE,KEY=VALUE` with overrides for this candidate alone."""
    recipe, colon, changes = text.partition(":")
    if not colon or not _NAME.match(changes):
        return Candidate(text)
    return Candidate(recipe, tuple(_COMMA_BEFORE_KEY.split(changes)))
