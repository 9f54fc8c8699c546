"""Sums over nodes of the tree of micro-batches that other ranks send to this rank, kept until every member has taken their total.

A key says everything about a sum (`Key`), so each is kept once, however often and in whatever order it comes.
"""

from collections import defaultdict

import torch
from torch import Tensor

from ttlaunch.runtime.comm.grpc.directory import Peer
from ttlaunch.runtime.comm.grpc.frames import BadFrameError
from ttlaunch.runtime.comm.grpc.pieces import Piece, PieceKind
from ttlaunch.runtime.comm.grpc.vectors import Key, bytes_of
from ttlaunch.runtime.comm.tree_exchange import Arriving, add_up

MOST_HELD_BYTES = 2**30
_MOST_KEYS = 2**16
_ITEM_BYTES = 4
_SUMS = torch.float32


class StoreFullError(Exception):
    """There is no room for more sums."""


class NodeSums:
    """The sums that a rank holds for others.

    Memory: at most `most_bytes`, and those of the last two steps of a name.
    """

    def __init__(self, *, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: dict[Key, Tensor] = {}
        self._done: dict[str, int] = {}  # the last step of which everything has been taken, or that is too old
        self._takers: defaultdict[tuple[str, int], set[Peer]] = defaultdict(set)

    @property
    def held_bytes(self) -> int:
        return sum(values.nbytes for values in self._held.values())

    def has(self, key: Key) -> bool:
        """Return whether a sum came before."""
        return key in self._held or key.step <= self._done.get(key.name, -1)

    def put(self, key: Key, sum_N: Tensor) -> bool:
        """Keep a sum; return False if it came before.

        Raises:
            StoreFullError: There is no room.
        """
        if self.has(key):
            return False
        self._forget(key.name, up_to=key.step - 2)  # a rank sends step s + 2 only when all have finished step s
        if self.held_bytes + sum_N.nbytes > self._most_bytes or len(self._held) >= _MOST_KEYS:
            raise StoreFullError(f"no room for {sum_N.nbytes} bytes more")
        self._held[key] = sum_N
        return True

    def total(self, wanted: Key) -> list[Tensor] | None:
        """Return values of the sum over the leaves 0 to `wanted.size`, in parts; None if some are missing.

        Order: that of the tree over the leaves, for any division into nodes and into ranges of values.
        """
        if wanted.size == 1:
            return self._values_of(wanted)
        arriving: Arriving = []
        leaf = 0
        while leaf < wanted.size:
            node = self._largest_node(wanted, leaf)
            if node is None:
                return None
            leaves, parts = node
            arriving.append((leaves, torch.cat(parts) if parts else torch.empty(0), None))
            leaf = leaves.stop
        return [add_up(arriving)]

    def take(self, wanted: Key, taker: Peer, *, members: int) -> None:
        """Note that a member has its total; when all have, the sums of the step are dropped."""
        takers = self._takers[wanted.name, wanted.step]
        takers.add(taker)
        if len(takers) >= members:
            self._forget(wanted.name, up_to=wanted.step)

    def clear(self) -> None:
        """Drop everything: another epoch has begun."""
        self._held.clear()
        self._done.clear()
        self._takers.clear()

    def _forget(self, name: str, *, up_to: int) -> None:
        self._done[name] = max(up_to, self._done.get(name, -1))
        for key in [key for key in self._held if key.name == name and key.step <= up_to]:
            del self._held[key]
        for takers in [one for one in self._takers if one[0] == name and one[1] <= up_to]:
            del self._takers[takers]

    def _largest_node(self, wanted: Key, leaf: int) -> tuple[range, list[Tensor]] | None:
        """Return the largest node that begins at a leaf and of which all wanted values are here."""
        is_same = (key for key in self._held if (key.name, key.step, key.start) == (wanted.name, wanted.step, leaf))
        for size in sorted({key.size for key in is_same if leaf + key.size <= wanted.size}, reverse=True):
            parts = self._values_of(wanted._replace(start=leaf, size=size))
            if parts is not None:
                return range(leaf, leaf + size), parts
        return None

    def _values_of(self, wanted: Key) -> list[Tensor] | None:
        """Return the wanted values of one node, from the ranges in which they came."""
        node = wanted._replace(first=0, last=0)
        ranges = sorted((key.first, key.last) for key in self._held if key._replace(first=0, last=0) == node)
        parts, at = [], wanted.first
        for first, last in ranges:
            if first <= at < min(last, wanted.last):
                parts.append(self._held[wanted._replace(first=first, last=last)][at - first : wanted.last - first])
                at = min(last, wanted.last)
        return parts if at >= wanted.last else None


class Assembly:
    """Sums that arrive in pieces on one stream, one after the other."""

    def __init__(self) -> None:
        self._key: Key | None = None
        self._sum_N = torch.empty(0)
        self._moved = 0

    def feed(self, piece: Piece) -> tuple[Key, Tensor] | None:
        """Take a piece; return the sum that it completes, if any.

        Raises:
            BadFrameError: No client sends it.
        """
        key = piece.key
        if self._key is None:
            _check(piece)
            self._key, self._sum_N, self._moved = key, torch.empty(key.last - key.first, dtype=_SUMS), 0
        if (key, piece.offset, piece.total) != (self._key, self._moved, self._sum_N.nbytes):
            raise BadFrameError("pieces of a sum in another order")
        bytes_of(self._sum_N)[piece.offset : piece.offset + len(piece.payload)] = piece.payload
        self._moved += len(piece.payload)
        if self._moved < self._sum_N.nbytes:
            return None
        self._key = None
        return key, self._sum_N

    def check_ended(self) -> None:
        """Raise `BadFrameError` if the last sum is not whole."""
        if self._key is not None:
            raise BadFrameError(f"only {self._moved} bytes of a sum")


def _check(piece: Piece) -> None:
    key = piece.key
    is_node = key.size > 0 and not key.size & (key.size - 1) and not key.start % key.size
    if piece.kind != PieceKind.PIECE or not is_node:
        raise BadFrameError("a sum of leaves that are no node of the tree")
    if piece.total != _ITEM_BYTES * (key.last - key.first) or piece.total > MOST_HELD_BYTES:
        raise BadFrameError(f"a sum of {piece.total} bytes for {key.last - key.first} values")
