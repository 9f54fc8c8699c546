"""The declaration that all exhibits share: workers in a ring or around a server, and what they ought to move."""

from ttlaunch.recipe import (
    Layout,
    Recipe,
    Traffic,
    TrainingFile,
    all_pairs,
    all_reduce_mean_traffic,
)


class Config(TrainingFile):
    """The sections every recipe shares."""


def traffic(config, ranks):
    """A ring's 2(W - 1)/W of S for each worker, or with a server S there and S back."""
    workers, server = ranks.of("worker"), ranks.of("server")
    if not server:
        values = ranks.weight_bytes(0) // 4 if workers else 0
        return all_reduce_mean_traffic(workers, values, micro_batches=config.training_config.micro_batches)
    found = []
    for worker in workers:
        found.append(Traffic("gradients", worker, server[0], per_step=ranks.weight_bytes(server[0])))
        found.append(Traffic("counts", worker, server[0], per_step=16))
        found.append(Traffic("weights", server[0], worker, per_step=ranks.weight_bytes(server[0])))
    return found


RECIPE = Recipe(
    summary="An exhibit.",
    config=Config,
    layouts=[Layout("single", trainer=1), Layout("ring", worker=None), Layout("served", worker=None, server=1)],
    flows=[all_pairs("worker"), ("worker", "server")],
    traffic=traffic,
)
