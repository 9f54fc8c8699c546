"""Bug 22: each worker goes through its own shard of the data to the end, and one shard is longer.

Its owner begins one step more than the others, and waits in the reduction for ranks that have gone home.
"""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def steps(self):
        is_longer = self.ctx.rank == self.workers[0]
        return range(1, self.cfg.training_config.steps + 1 + is_longer)  # the bug


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
