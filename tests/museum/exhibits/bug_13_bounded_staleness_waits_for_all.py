"""Bug 13: "bounded staleness" that waits for everybody's gradient of a step before it begins the next.

The bound is a key that changes nothing: the fastest worker is as slow as the slowest.
"""

from ttlaunch.runtime.parallel.staleness.protocol import Clock


class Wrong(Clock):
    @property
    def may_begin(self):
        return self.begun == self.applied  # the bug


CLOCK = Wrong
