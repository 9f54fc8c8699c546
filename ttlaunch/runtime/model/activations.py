"""The functions that `transformer_config.activation` names."""

from collections.abc import Callable
from functools import partial
from typing import Final

from torch import Tensor
from torch.nn import functional

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
}
"""Each is computed value by value, so neither a batch nor a split of columns changes its bits.

Source: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016; GPT-2 uses the approximation of its section 2.
"""
