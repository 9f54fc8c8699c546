"""Bug 7: the stage's layers are a list of modules, and the list is called as if it were one."""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def differentiate(self, step, index, x_BT, y_BT):
        x_BTD = self.model.embedding(x_BT, None)
        return self.model.blocks(x_BTD)  # the bug


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
