"""Bug 15: the server counts itself among the workers, begins its list at the second, and waits for one gradient too few.

It adds its own, which is zero, and never receives the first worker's: a part of every batch is thrown away.
"""

from tests.museum.loop import ServedWorker, Server, trainer  # noqa: F401  a role


class Wrong(Server):
    def senders(self):
        return self.workers[1:]  # the bug


def worker(cfg, ctx):
    ServedWorker(cfg, ctx).run()


def server(cfg, ctx):
    Wrong(cfg, ctx).run()
