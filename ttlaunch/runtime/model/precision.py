"""In which precision a pass computes: `training_config.precision`.

Weights, gradients, their sums and the optimizer's state are float32 whatever the precision; autocast gives matrix products
and attention copies of their operands in bfloat16 or float16. The residual stream, which is what crosses from one
pipeline stage to the next, is float32 in every precision, and so are the logits' loss and its gradient: so a stage
computes the bits that one process does, at the price of messages twice as long as they could be.

Source: P. Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from ttlaunch.spec.recipe.sections import TrainingConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computing(training: TrainingConfig, device: torch.device) -> AbstractContextManager[object]:
    """A block that computes in the configured precision on this device; fp32 leaves everything as it is."""
    dtype = _DTYPES.get(training.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
