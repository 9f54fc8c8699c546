"""How much work the operations of torch are: what a virtual clock charges a rank for, when nothing is computed.

Matrix products, convolutions and attention are charged by their floating-point operations, as torch's own counter counts them. An
update of parameters is charged by its values, because memory limits it. All other operations cost nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

UPDATE_S = 2e-9
"""Seconds for each value that an optimizer updates: AdamW reads and writes 28 bytes, at 14 GB/s."""

_aten = torch.ops.aten
_UPDATES = frozenset({_aten._fused_adamw_, _aten._fused_sgd_})
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


@dataclass
class Work:
    """Work that has been done: floating-point operations, and values updated."""

    flops: int = 0
    updated: int = 0

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, out: Any) -> None:
        """Add one operation; `Hollow` calls it."""
        work = work_of(func, args, kwargs, out=out)
        self.flops, self.updated = self.flops + work.flops, self.updated + work.updated


def work_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, out: Any) -> Work:
    """Return how much work an operation is."""
    packet = func._overloadpacket  # noqa: SLF001
    if packet in _UPDATES:
        return Work(updated=sum(one.numel() for one in args[0]))
    if packet is _ATTENTION:
        return Work(int(sdpa_flop_count(*(one.shape for one in args[:3]))))
    if packet is _ATTENTION_BACKWARD:
        return Work(int(sdpa_backward_flop_count(*(one.shape for one in args[:4]))))
    count = flop_registry.get(packet)
    return Work() if count is None else Work(int(count(*args, **kwargs, out_val=out)))


def spending(
    compute: Callable[[float], object],
    *,
    flops_per_s: float,
    update: Callable[[int], object] | None = None,
) -> Callable[..., object]:
    """Return what `Hollow` calls for each operation: it charges the time that the operation takes.

    Args:
        compute: Charges seconds.
        flops_per_s: How many floating-point operations a second has.
        update: Charges an update of so many values; None: `compute` does.
    """

    def spend(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, out: Any) -> None:
        work = work_of(func, args, kwargs, out=out)
        if update is not None and work.updated:
            update(work.updated)
            return
        seconds = work.flops / flops_per_s + work.updated * UPDATE_S
        if seconds:
            compute(seconds)

    return spend
