"""Bug 17: the server serves for ever; when the workers have done their last step it waits for another gradient."""

from itertools import count

from tests.museum.loop import ServedWorker, Server, trainer  # noqa: F401  a role


class Wrong(Server):
    def steps(self):
        return count(1)  # the bug


def worker(cfg, ctx):
    ServedWorker(cfg, ctx).run()


def server(cfg, ctx):
    Wrong(cfg, ctx).run()
