"""Bug 14: staleness is entered each time that the loop looks whether a mean has come, not once for each that was applied.

The slower the network, the more often a stale gradient is looked at, and the larger the average.
"""

from ttlaunch.runtime.parallel.staleness.protocol import Staleness


class Wrong:
    def __init__(self):
        self.staleness = Staleness()

    def look(self, age):
        self.staleness.count(age)  # the bug

    def apply(self, age):
        self.staleness.count(age)


RECORDER = Wrong
