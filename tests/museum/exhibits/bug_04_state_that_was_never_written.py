"""Bug 4: on resume the optimizer's state is looked up under a key that saving never wrote, and a default takes its place.

The weights are right, so the loss goes on where it was. Both of AdamW's moments begin at zero again.
"""

from tests.museum.loop import Worker, trainer  # noqa: F401  a role


class Wrong(Worker):
    def restore(self):
        super().restore()
        for _, tensor in self.optimizer.named_state():
            tensor.zero_()  # the bug: what `state.get("optimizer_state", fresh)` comes to


def worker(cfg, ctx):
    Wrong(cfg, ctx).run()
