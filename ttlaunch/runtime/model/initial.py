"""What training begins with: every parameter is drawn from its name, so who has which does not matter."""

from torch import Tensor

from ttlaunch.runtime.model.dropout import seeded_generator
from ttlaunch.runtime.model.tied import EMBEDDING, HEAD

_STDS = {EMBEDDING: 1.0, "embedding.position.weight": 0.1, HEAD: 0.02}


def initialise(name: str, parameter: Tensor, *, seed: int, num_blocks: int, is_tied: bool) -> None:
    """Set a parameter from (seed, name) alone.

    Biases are 0, norms 1. The standard deviation is 1 for tokens, 0.1 for positions, and 0.02 for the head, and for tokens
    that share its matrix, so that training begins at the loss of guessing; for the other matrices 1 / sqrt(inputs), and for those that add to the
    residual stream 1 / sqrt(2 num_blocks) of that, as in GPT-2.
    """
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name:
        parameter.fill_(1)
    else:
        std = _STDS.get(HEAD if is_tied and name == EMBEDDING else name, float(parameter[0].numel()) ** -0.5)
        if name.endswith("_out.weight"):
            std *= (2 * num_blocks) ** -0.5
        parameter.normal_(0, std, generator=seeded_generator("parameter", seed, name))
