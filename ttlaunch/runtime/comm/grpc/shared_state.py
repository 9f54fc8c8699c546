"""What a rank gives to workers that ask for it: vectors of its state, each of one step.

A worker that joins pulls 1/n of each vector from every member. So every answer must be of the step that was asked for, and must
not change while it is being sent, although the rank trains on.
"""

import threading
from collections import defaultdict
from typing import Protocol

from torch import Tensor

from ttlaunch.runtime.comm.grpc.vectors import Key, bytes_of
from ttlaunch.runtime.comm.protocol import CommunicationError


class NotHeldError(CommunicationError):
    """A rank does not have a vector of the step that was asked for; the text says what it has."""


class StateSource(Protocol):
    """Where a rank's vectors are read from; called in the thread of the streams, so an answer must not take long."""

    def newest(self, name: str) -> int | None:
        """Return the newest step of which the vector is held; None if there is none."""

    def read(self, key: Key) -> memoryview:
        """Return the bytes of values `key.first` to `key.last` of a vector of step `key.step`.

        The bytes must never change afterwards: they are sent while the rank trains on.

        Raises:
            NotHeldError: There is no such vector, or it has fewer values.
        """


class Snapshots:
    """Copies of a rank's vectors, by step; a `StateSource`. Any thread may call any method.

    Memory: the vectors of each step from `hold` to `forget`, and longer while one is being sent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)

    def hold(self, step: int, name: str, vector_N: Tensor) -> None:
        """Copy a vector, shape `(N,)`, to be read as that of this step."""
        copy_N = vector_N.detach().cpu().clone()
        with self._lock:
            self._held[name][step] = copy_N

    def forget(self, *, before: int) -> None:
        """Drop the vectors of steps before this one."""
        with self._lock:
            for held in self._held.values():
                for step in [step for step in held if step < before]:
                    del held[step]

    def newest(self, name: str) -> int | None:
        with self._lock:
            return max(self._held[name], default=None) if name in self._held else None

    def read(self, key: Key) -> memoryview:
        with self._lock:
            held = dict(self._held.get(key.name, {}))
        vector_N = held.get(key.step)
        if vector_N is None:
            steps = ", ".join(map(str, sorted(held))) or "none"
            raise NotHeldError(f"`{key.name}` of step {key.step} is not held; steps held: {steps}")
        if key.last > len(vector_N):
            raise NotHeldError(f"`{key.name}` has {len(vector_N)} values, not {key.last}")
        return bytes_of(vector_N[key.first : key.last])
