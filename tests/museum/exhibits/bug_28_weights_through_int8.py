"""Bug 28: the codec that is meant for gradients carries weights, too.

A worker computes with weights that are off by up to 1/254 of a block's largest; gradients are of another model than the
server's. Error feedback cannot help, since a weight is not a sum of what was sent before.
"""

import torch

from tests.museum.loop import ServedWorker, Server, trainer  # noqa: F401  a role
from ttlaunch.runtime.parallel.compression.int8 import BlockInt8

CODEC = BlockInt8()


class WrongWorker(ServedWorker):
    def receive_weights(self):
        payload = torch.empty(CODEC.payload_bytes(len(self.model.weights_N)), dtype=torch.uint8)
        self.ctx.recv(payload, source=self.ctx.sole("server"), operation="weights")
        CODEC.decode(payload, self.model.weights_N)  # the bug


class WrongServer(Server):
    def send_weights(self, worker):
        self.ctx.send(CODEC.encode(self.model.weights_N), dest=worker, operation="weights")


def worker(cfg, ctx):
    WrongWorker(cfg, ctx).run()


def server(cfg, ctx):
    WrongServer(cfg, ctx).run()
