"""No bug: what every exhibit beside it would be without its own."""

from tests.museum.loop import ServedWorker, Server, Worker, trainer  # noqa: F401  a role


def worker(cfg, ctx):
    (ServedWorker if ctx.ranks("server") else Worker)(cfg, ctx).run()


def server(cfg, ctx):
    Server(cfg, ctx).run()
