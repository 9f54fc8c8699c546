"""Lets a script send numbers about its steps to ttlaunch: `ttlaunch.log(step=3, loss=0.5)`. Python 3.9, standard library only."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ttlaunch import contract

_RESERVED = frozenset({"kind", "time"})


def log(*, step: int, **values: float) -> None:
    """Report a finished step of this rank; do nothing in a process that ttlaunch has not started.

    `loss`, `tokens`, `samples` and `grad_norm` mean what they mean in a recipe: the views, `report`, `metrics`, `compare`, `diff` and
    the sinks show them. Other names are metrics too. Call it once a step, from any rank; one rank is enough for a loss that all share.

    Args:
        step: The number of the step, from 1.
        values: Numbers by name; tensors of one number are converted, which waits for their device.

    Raises:
        ValueError: The step is no positive integer, or a name or value cannot be a metric.

    Cost: the file is opened, written and closed; no message.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"step is {step!r}; a positive integer was expected")
    wrong = sorted(_RESERVED.intersection(values))
    if wrong:
        raise ValueError(f"a metric cannot be called `{wrong[0]}`")
    numbers = {name: value if type(value) in {int, float} else _number(name, value) for name, value in values.items()}
    folder, rank = os.environ.get(contract.ENV_RUN_DIR), os.environ.get(contract.ENV_RANK, "")
    if not folder or not rank.isdigit():
        return
    record = {"kind": contract.KIND_STEP, "time": time.time(), "step": step, **numbers}
    contract.append_progress(Path(folder, contract.progress_file(int(rank))), record)


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`{name}` is {value!r:.60}; a number was expected") from error
