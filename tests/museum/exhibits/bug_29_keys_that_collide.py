"""Bug 29: gradients are kept by step and sender; a sender's second parameter takes the place of its first.

The count says that all have sent, and the sum has one parameter's gradients under another's name.
"""

from collections import Counter

from ttlaunch.runtime.parallel.zero.accumulator import Receipt


class Wrong:
    def __init__(self, parameters, *, senders):
        self.senders, self.receipts, self.found = senders, Counter(), {}

    def add(self, gradient, *, step, parameter, sender):
        self.found[step, sender] = gradient.clone()  # the bug: `parameter` is not part of the key
        self.receipts[Receipt.COUNTED] += 1
        return Receipt.COUNTED

    def is_ready(self, *, step, parameter):
        return all((step, sender) in self.found for sender in self.senders)

    def take_sum(self, *, step, parameter, timeout_s=0.0):
        return sum(self.found[step, sender] for sender in self.senders)


ACCUMULATOR = Wrong
