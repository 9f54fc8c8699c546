"""Bug 16: the server has no timeout; a worker that does not come keeps everybody from the next step.

The last worker leaves after half of the steps, as one does whose host is slow or gone.
"""

from tests.museum.loop import ServedWorker, Server, trainer  # noqa: F401  a role


class Late(ServedWorker):
    def steps(self):
        is_last = self.ctx.rank == self.workers[-1]
        return range(1, self.cfg.training_config.steps // (2 if is_last else 1) + 1)


def worker(cfg, ctx):
    Late(cfg, ctx).run()


def server(cfg, ctx):
    Server(cfg, ctx).run()  # the bug: `recv` without a limit for each of the workers
