"""Bug 30: a thread says every moment that the rank is alive, whatever the rank does; the step hangs, and the thread beats on."""

import os
import pathlib
import threading

import torch

ENDED = threading.Event()


def beat():
    while not ENDED.wait(0.05):
        print("alive", flush=True)


def peer(cfg, ctx):
    threading.Thread(target=beat, daemon=True).start()  # the bug: a pulse is not progress
    for step in range(1, 4):
        ctx.step = step
        ctx.traffic.begin_step(step)
        if step == 2 and ctx.rank == 1:
            pathlib.Path("hangs").write_text(str(os.getpid()))
            ENDED.wait(600)
        pending = ctx.isend(torch.zeros(2), dest=1 - ctx.rank)
        ctx.recv(torch.zeros(2), source=1 - ctx.rank)
        pending.wait()
        ctx.report(step)
