"""What makes a process quick in which ranks run on a virtual clock."""

import faulthandler
import gc
import os

import torch

from ttlaunch.runtime.freed_memory import keep_if_unlimited


def prepare_process() -> None:
    """Give all time to one rank after the other: one thread, few searches for cycles of objects, and freed memory that stays.

    Messages are no part of cycles, and there are many of them. The arrays of a million pairs of ranks are made and freed hundreds of times;
    for 1,024 workers of `zero` the kernel would clear their pages for 9 s.
    """
    faulthandler.enable()
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    keep_if_unlimited(os.environ)
