"""The ways in which ranks get stuck, one function each; every rank calls it in the step that was ordered."""

import ctypes
import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor

from ttlaunch.train import RankContext, barrier, broadcast

from .order import LONG_S, note_begin

_ODD_TAG, _OTHER_TAG = 5, 6


def circle_of_2(ctx: RankContext, values_N: Tensor, rank: int) -> None:
    """Two that both receive first."""
    pair = (rank, (rank + 1) % ctx.world_size)
    if ctx.rank in pair:
        note_begin()
        other = sum(pair) - ctx.rank
        ctx.recv(values_N, source=other)  # stuck: circle_of_2
        ctx.send(values_N, dest=other)


def circle_of_3(ctx: RankContext, values_N: Tensor, rank: int) -> None:
    """Three of four that all receive first."""
    members = [(rank + step) % ctx.world_size for step in range(3)]
    if ctx.rank in members:
        note_begin()
        at = members.index(ctx.rank)
        ctx.recv(values_N, source=members[at - 1])  # stuck: circle_of_3
        ctx.send(values_N, dest=members[(at + 1) % 3])


def order_of_collectives(ctx: RankContext, values_N: Tensor, rank: int) -> None:
    """One takes the broadcast before the barrier, the others after it."""
    everyone, root = ctx.ranks("peer"), (rank + 1) % ctx.world_size
    if ctx.rank == rank:
        note_begin()
        broadcast(ctx, values_N, root=root, among=everyone)  # stuck: order_of_collectives
    barrier(ctx, among=everyone)
    if ctx.rank != rank:
        broadcast(ctx, values_N, root=root, among=everyone)


def wrong_tag(ctx: RankContext, values_N: Tensor, rank: int) -> None:
    """One receives under another tag than its neighbour sends."""
    if ctx.rank == rank:
        note_begin()
        ctx.recv(values_N, source=(rank + 1) % ctx.world_size, tag=_ODD_TAG)  # stuck: wrong_tag
    elif ctx.rank == (rank + 1) % ctx.world_size:
        ctx.send(values_N, dest=rank, tag=_OTHER_TAG)


def wrong_source(ctx: RankContext, values_N: Tensor, rank: int) -> None:
    """One receives from another rank than the one that sends to it."""
    if ctx.rank == rank:
        note_begin()
        ctx.recv(values_N, source=(rank + 2) % ctx.world_size, tag=_ODD_TAG)  # stuck: wrong_source
    elif ctx.rank == (rank + 1) % ctx.world_size:
        ctx.send(values_N, dest=rank, tag=_ODD_TAG)


def wrong_shape(ctx: RankContext, values_N: Tensor, rank: int) -> None:
    """One expects a vector of three parts from its neighbour, whose vector has two."""
    parts = 3 if ctx.rank == rank else 2
    values_PN = torch.zeros(parts, values_N.numel())
    if ctx.rank == rank:
        note_begin()
        for part_N in values_PN:
            ctx.recv(part_N, source=(rank + 1) % ctx.world_size, tag=_ODD_TAG)  # stuck: wrong_shape
    elif ctx.rank == (rank + 1) % ctx.world_size:
        for part_N in values_PN:
            ctx.send(part_N, dest=rank, tag=_ODD_TAG)


def left_out(ctx: RankContext, values_N: Tensor, rank: int) -> None:  # noqa: ARG001 - as all
    """One leaves a barrier out, and goes on to the next step."""
    if ctx.rank == rank:
        note_begin()
        return
    barrier(ctx, among=ctx.ranks("peer"))


def sleeps(ctx: RankContext, values_N: Tensor, rank: int) -> None:  # noqa: ARG001 - as all
    """One sleeps."""
    if ctx.rank == rank:
        note_begin()
        time.sleep(LONG_S)  # stuck: sleeps


def data_loader(ctx: RankContext, values_N: Tensor, rank: int) -> None:  # noqa: ARG001 - as all
    """One waits for the process that reads its data, which never answers."""
    if ctx.rank == rank:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        fork.Process(target=theirs.recv, daemon=True).start()
        note_begin()
        ours.recv()  # stuck: data_loader


def stopped(ctx: RankContext, values_N: Tensor, rank: int) -> None:  # noqa: ARG001 - as all
    """One is stopped."""
    if ctx.rank == rank:
        note_begin()
        os.kill(os.getpid(), signal.SIGSTOP)  # stuck: stopped


def locked_file(ctx: RankContext, values_N: Tensor, rank: int) -> None:  # noqa: ARG001 - as all
    """One waits for a lock that a process of its own holds."""
    if ctx.rank == rank:
        held = Path("lock").open("w")  # noqa: SIM115 - for as long as the rank lives
        fcntl.flock(held, fcntl.LOCK_EX)
        with Path("lock").open("w") as other:
            note_begin()
            fcntl.flock(other, fcntl.LOCK_EX)  # stuck: locked_file


def endless_loop(ctx: RankContext, values_N: Tensor, rank: int) -> None:  # noqa: ARG001 - as all
    """One counts for ever."""
    if ctx.rank == rank:
        note_begin()
        number = 0
        while number >= 0:  # stuck: endless_loop
            number += 1  # stuck: endless_loop


def compiled_code(ctx: RankContext, values_N: Tensor, rank: int) -> None:  # noqa: ARG001 - as all
    """One is in compiled code that holds Python's lock and takes no signal, nor does any of its threads."""
    if ctx.rank == rank:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        note_begin()
        ctypes.PyDLL(None).sleep(int(LONG_S))  # stuck: compiled_code


def first_step(ctx: RankContext, values_N: Tensor, rank: int) -> None:  # noqa: ARG001 - as all
    """One never gets through its first step."""
    if ctx.rank == rank:
        note_begin()
        time.sleep(LONG_S)  # stuck: first_step
