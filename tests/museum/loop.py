"""A data-parallel training in fifty lines, cut where the exhibits go wrong: each overrides one piece with its bug.

As it stands here it has the bits of one process; `test_museum.py` says so first. Roles: `worker`, in a ring or with a
`server` that averages and updates; `trainer`, the one process.

Shapes: N = values of the flat vectors of weights and gradients.
"""

import torch

from ttlaunch.train import (
    all_reduce_mean,
    build_model,
    build_optimizer,
    differentiate,
    global_norm,
    micro_batches,
    train_in_one_process,
)


def trainer(cfg, ctx):
    train_in_one_process(cfg, ctx)


class Worker:
    """All-reduces the mean gradient with the other workers."""

    def __init__(self, cfg, ctx):
        self.cfg, self.ctx = cfg, ctx
        self.workers = ctx.ranks("worker")
        self.model = build_model(cfg, ctx)
        self.optimizer = build_optimizer(cfg, self.model, total_steps=ctx.data(cfg).total_steps)
        self.sums = ctx.gradient_tree(self.model.weights_N)

    def run(self):
        self.restore()
        for step in self.steps():
            for index, x_BT, y_BT in self.batches(step):
                loss, tokens = self.differentiate(step, index, x_BT, y_BT)
                self.sums.add(index, self.model.take_gradients(), tokens=tokens, loss=loss)
                self.model.zero_grad()
            loss, tokens = self.reduce()
            norm = global_norm(self.optimizer.squared_norms())
            self.update(step, norm)
            self.ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm)
            self.save(step)
        self.ctx.report_parameters(self.model.named_parameters())

    def restore(self):
        self.ctx.restore(self.model, self.optimizer)

    def steps(self):
        return self.ctx.steps(self.cfg)

    def batches(self, step):
        return micro_batches(self.cfg, self.ctx, step, among=self.workers)

    def differentiate(self, step, index, x_BT, y_BT):
        return differentiate(self.model, x_BT, y_BT, masks=self.model.masks(step, index))

    def reduce(self):
        """Leave the gradient of the mean loss in `grads_N`; loss and tokens of the whole step."""
        count = self.cfg.training_config.micro_batches
        return all_reduce_mean(self.ctx, self.sums, self.model.grads_N, among=self.workers, micro_batches=count)

    def update(self, step, norm):
        return self.optimizer.step(step, norm=norm)

    def save(self, step):
        if self.ctx.rank == self.workers[0]:
            self.ctx.checkpoint(step, self.model, self.optimizer, owners=self.workers[:1])


class ServedWorker(Worker):
    """Sends its block's sum to the server, and reads the weights that come back."""

    def run(self):
        for step in self.steps():
            for index, x_BT, y_BT in self.batches(step):
                loss, tokens = self.differentiate(step, index, x_BT, y_BT)
                self.sums.add(index, self.model.take_gradients(), tokens=tokens, loss=loss)
                self.model.zero_grad()
            (node,) = self.sums.subtrees()
            self.ctx.send(node.gradient_N, dest=self.ctx.sole("server"), operation="gradients")
            counts = torch.tensor([node.loss, node.tokens], dtype=torch.float64)
            self.ctx.send(counts, dest=self.ctx.sole("server"), operation="counts")
            self.sums.clear()
            self.receive_weights()
            self.ctx.report(step)
        self.ctx.report_parameters(self.model.named_parameters())

    def receive_weights(self):
        self.ctx.recv(self.model.weights_N, source=self.ctx.sole("server"), operation="weights")


class Server(Worker):
    """Adds up what the workers send, in their order, updates, and sends weights back."""

    def run(self):
        for step in self.steps():
            loss, tokens = self.collect()
            norm = global_norm(self.optimizer.squared_norms())
            self.update(step, norm)
            for worker in self.workers:
                self.send_weights(worker)
            self.ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm)
        self.ctx.report_parameters(self.model.named_parameters())

    def collect(self):
        part_N, counts = torch.empty_like(self.model.grads_N), torch.zeros(2, dtype=torch.float64)
        loss, tokens = 0.0, 0
        for worker in self.senders():
            self.ctx.recv(part_N, source=worker, operation="gradients")
            self.ctx.recv(counts, source=worker, operation="counts")
            self.model.grads_N.add_(part_N)
            loss, tokens = loss + counts[0].item(), tokens + int(counts[1])
        self.model.grads_N.div_(tokens)
        return loss / tokens, tokens

    def senders(self):
        return self.workers

    def send_weights(self, worker):
        self.ctx.send(self.model.weights_N, dest=worker, operation="weights")
