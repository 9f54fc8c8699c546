"""Which columns of each linear layer a rank has, where ranks share the matrices of a served model.

Columns of the output: nothing is summed, and no rank has fewer than 16 of them (`rules.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.model.split import Split
from ttlaunch.runtime.serving import rules
from ttlaunch.spec.recipe.sections import TrainingFile


@dataclass(frozen=True)
class Shares:
    """How ranks share the matrices of a model.

    Attributes:
        cfg: The model.
        count: The number of ranks; 1: nothing is shared.
    """

    cfg: TrainingFile
    count: int = 1

    def heads(self, place: int) -> range:
        """Return the heads of every block with which the rank at this place attends; empty if the model has none."""
        if self._is_llama:
            return range(self.cfg.transformer_config.kv_heads)
        return self.heads_of_all[place]

    @property
    def heads_of_all(self) -> list[range]:
        """The heads of each rank, of a model whose heads are shared."""
        kind, heads = self.cfg.training_config.model_type, self.cfg.transformer_config.num_heads
        return _cut_evenly(heads if kind == "gpt" else 0, self.count)

    def parts(self, name: str, outputs: int) -> list[list[range]]:
        """Return the columns of each rank, in their order in what it computes.

        Args:
            name: The layer, such as `blocks.3.feed_forward_in`.
            outputs: The number of its columns.

        Raises:
            ValueError: A rank would have too few.
        """
        if self.cfg.training_config.model_type == "gpt" and name.endswith("attention_in"):
            return self._head_columns(outputs)
        if not self.is_gated(name):
            return [[part] for part in rules.cut_columns(outputs, self.count)]
        inside = outputs // 2  # a gate, and then what it multiplies
        shares = rules.cut_columns(inside, self.count)
        return [[part, range(inside + part.start, inside + part.stop)] for part in shares]

    def is_gated(self, name: str) -> bool:
        """Whether half of a layer's outputs are a gate for the other half."""
        return self._is_llama and name.endswith("feed_forward_in")

    def splits(self, model: Model, place: int) -> Iterator[tuple[str, Split]]:
        """Yield which values of each parameter the rank at a place has, for a model whose parameters have no values yet.

        Raises:
            ValueError: A rank would have too few columns.
        """
        if self.count == 1:
            return
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) or (name == "head.output" and model.is_tied):
                continue
            own = tuple(self.parts(layer_name(name), len(layer.weight))[place])
            for kind, parameter in layer.named_parameters():
                yield f"{name}.{kind}", Split(tuple(parameter.shape), 0, own)

    def _head_columns(self, outputs: int) -> list[list[range]]:
        """For each rank, the columns of its heads' queries, keys and values."""
        each, width = outputs // 3, outputs // 3 // self.cfg.transformer_config.num_heads
        return [
            [range(each * matrix + width * part.start, each * matrix + width * part.stop) for matrix in range(3)]
            for part in self.heads_of_all
        ]

    @property
    def _is_llama(self) -> bool:
        return self.cfg.training_config.model_type == "llama"


def layer_name(module: str) -> str:
    """Return the name of a linear layer, given that of its module."""
    return "head" if module == "head.output" else module


def _cut_evenly(items: int, count: int) -> list[range]:
    return [range(place * items // count, (place + 1) * items // count) for place in range(count)]
