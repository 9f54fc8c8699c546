"""A second answer to what an elastic run of `local_sgd` or `diloco` computes: in one process, from its journal alone.

It shares no code with `ttlaunch/membership` or `LocalReplica`: all workers live side by side in one process, without messages.
"""

import json
import shutil
from pathlib import Path

from .elastic_runs import RECIPES, in_one_process

TRAINER = '''
import json, pathlib
import torch
from ttlaunch.train import build_model, build_optimizer, differentiate, global_norm, micro_batches

JOURNAL = json.loads((pathlib.Path(__file__).parent / "journal.json").read_text())


def tree(parts):
    """Add up in pairs: the left half has the largest power of two that is less than all."""
    if len(parts) == 1:
        return parts[0]
    left = 1
    while 2 * left < len(parts):
        left *= 2
    return tree(parts[:left]) + tree(parts[left:])


class Worker:
    def __init__(self, cfg, ctx, agreed_N=None):
        self.model = build_model(cfg, ctx)
        if agreed_N is not None:
            self.model.weights_N.copy_(agreed_N)
        self.optimizer = build_optimizer(cfg, self.model, total_steps=ctx.data(cfg).total_steps)
        self.seen = 0

    def step(self, cfg, ctx, step, *, block):
        sums, seen, model = [], 0, self.model
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, indices=block):
            _, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            sums.append(model.take_gradients().clone())
            model.zero_grad()
            seen += tokens
        model.grads_N.copy_(tree(sums) / seen)
        self.optimizer.step(step, norm=global_norm(self.optimizer.squared_norms()))
        self.seen += seen


def counting_epochs():
    """The journal without the epochs of which nobody who lives has made a step; and who has come with each."""
    found = []
    for entry in JOURNAL:
        found = found[:1] + [epoch for epoch in found[1:] if epoch["step"] < entry["step"]]
        known = {number for epoch in found for number in epoch["members"]} if found else set(entry["members"])
        found.append({**entry, "come": (set(entry["members"]) - known) | set(entry["joined"])})
    return found


def block_of(cfg, numbers, number):
    count, place = cfg.training_config.micro_batches, numbers.index(number)
    each, more = divmod(count, len(numbers))
    first = place * each + min(place, more)
    return range(first, first + each + (place < more))


@torch.no_grad()
def average(group):
    total = sum(worker.seen for worker in group)
    return tree([worker.model.weights_N * (worker.seen / total if total else 1 / len(group)) for worker in group])


@torch.no_grad()
def outer_step(cfg, agreed_N, average_N, momentum_N):
    if not hasattr(cfg, "diloco_config"):
        return average_N
    rate, decay = cfg.diloco_config.outer_learning_rate, cfg.diloco_config.outer_momentum
    moved_N = agreed_N - average_N
    momentum_N.mul_(decay).add_(moved_N)
    return average_N - ((moved_N + decay * momentum_N) * rate - moved_N)


def trainer(cfg, ctx):
    epochs, last = counting_epochs(), ctx.data(cfg).total_steps
    every = (cfg.diloco_config if hasattr(cfg, "diloco_config") else cfg.local_sgd_config).every
    workers = {number: Worker(cfg, ctx) for number in epochs[0]["members"]}
    agreed_N = next(iter(workers.values())).model.weights_N.clone()
    momentum_N = torch.zeros_like(agreed_N)
    for step in range(1, last + 1):
        for epoch in epochs[1:]:
            if epoch["step"] == step - 1:
                workers |= {number: Worker(cfg, ctx, agreed_N) for number in epoch["come"]}
        numbers = [epochs[0], *(epoch for epoch in epochs[1:] if epoch["step"] <= step - 2)][-1]["members"]
        for number in numbers:
            workers[number].step(cfg, ctx, step, block=block_of(cfg, numbers, number))
        if step % every == 0 or step == last:
            members = [epochs[0], *(epoch for epoch in epochs[1:] if epoch["step"] < step)][-1]["members"]
            group = [workers[number] for number in members]
            agreed_N = outer_step(cfg, agreed_N, average(group), momentum_N)
            for worker in workers.values():
                worker.model.weights_N.copy_(agreed_N)
                worker.seen = 0
        ctx.report(step)
    model = next(iter(workers.values())).model
    model.weights_N.copy_(agreed_N)
    ctx.report_parameters(model.named_parameters())
'''


def replay(folder: Path, config, journal, *, recipe):
    """Return the digest of the parameters that a run of this recipe with this journal ends with.

    Args:
        folder: Where the replay may write; it must not exist.
        config: The sections of the run's training file.
        journal: Of each epoch its `step`, `members` and `joined`, as in `members.jsonl`.
        recipe: The name of the recipe.
    """
    folder.mkdir()
    source = folder / "recipe"
    shutil.copytree(RECIPES / recipe, source)
    (source / "trainer.py").write_text(TRAINER)
    (source / "journal.json").write_text(json.dumps(journal))
    return in_one_process(folder / "run", config, recipe=source)[0]
