"""Stands in for the copies of a GPU: between tensors of the CPU, late, in odd order, and loud where a buffer is used too soon."""

import random
import weakref

import torch

POISON = 0xA5


class LateCopier:
    """Copies that are complete after some questions, a different number for each; those of one stream keep no order.

    Attributes:
        live_bytes: What has been allocated and not been freed.
        allocated: How many times memory was allocated.
    """

    def __init__(self, *, seed=0, most_questions=40, takes=lambda _: True):
        self.takes = takes
        self.live_bytes = self.allocated = 0
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._most_questions = most_questions
        self._marks = 0

    def allocate(self, size):
        self.allocated += 1
        self.live_bytes += size
        memory = bytearray([POISON]) * size
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        weakref.finalize(tensor.untyped_storage(), self._free, size)
        return tensor

    def _free(self, size):
        self.live_bytes -= size

    def now(self, tensor):
        del tensor
        self._marks += 1
        return self._marks

    def fetch(self, tensor, host):
        bytes_of(host).fill_(POISON)  # what a message that leaves too soon carries
        return self._late(lambda: host.copy_(tensor))

    def fill(self, tensor, host, *, since):
        assert 0 < since <= self._marks
        tensor.detach().copy_(host)  # a reader of the tensor waits for the copy on the device
        before = bytes_of(host).clone()

        def check():
            assert torch.equal(before, bytes_of(host)), "host memory was used again while a copy read it"

        return self._late(check)

    def _late(self, finish):
        return LateCopy(finish, self._random.randrange(self._most_questions + 1))


class LateCopy:
    def __init__(self, finish, questions):
        self._finish = finish
        self._questions = questions

    def is_done(self):
        if self._questions > 0:
            self._questions -= 1
            return False
        self.wait()
        return True

    def wait(self):
        self._questions = 0
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def bytes_of(tensor):
    return tensor.view(-1).view(torch.uint8)
