"""The places of ranks in a pipeline, as replicas × stages × shares, and the parts of the model that each stage has.

    replica 0:   rank 0 (stage 0)   rank 1 (stage 1)   ...  rank p-1 (stage p-1)
    replica 1:   rank p             rank p+1           ...  rank 2p-1

If several ranks split the matrices of a stage, each place in this picture stands for these ranks, which have consecutive numbers.

The model is cut into `p * v` contiguous parts; part i lies on stage `i % p`, where it is chunk `i // p`. With one chunk
a stage (v = 1), this is the plain pipeline: part i on stage i.
"""

from dataclasses import dataclass

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.parallel.tensor.grid import place_in_grid
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class PipelineGrid:
    """This rank's place in the pipelines.

    Attributes:
        stages: The ranks of its replica, from the first stage to the last; activations flow along them.
        replicas: The ranks with its parts of the model, in the order of their micro-batches; they average gradients.
        shares: The ranks that split the matrices of its stage, in its replica.
        first_pipeline: All ranks of the first replica.
        reporter: The rank that reports losses: the first rank of the last stage, in the first replica.
    """

    rank: Rank
    stages: tuple[Rank, ...]
    replicas: tuple[Rank, ...]
    shares: tuple[Rank, ...]
    first_pipeline: tuple[Rank, ...]
    reporter: Rank

    @property
    def stage(self) -> int:
        return self.stages.index(self.rank)

    @property
    def replica(self) -> int:
        return self.replicas.index(self.rank)

    @property
    def next_stage(self) -> Rank | None:
        """The rank of the stage after this one; None on the last."""
        return next(iter(self.stages[self.stage + 1 :]), None)

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last stage, the only one that computes the loss."""
        return self.rank == self.stages[-1]

    @property
    def is_reporting(self) -> bool:
        """Whether this rank is the one, among those that compute the loss, that reports it."""
        return self.rank == self.reporter


def place_in_pipeline(ctx: RankContext, *, num_stages: int, ranks_per_stage: int = 1) -> PipelineGrid:
    """Find this rank's place among the ranks of its role, which are numbered replica by replica, then stage by stage.

    Raises:
        ValueError: The ranks do not make whole replicas.
    """
    ranks, width = ctx.ranks(ctx.role), num_stages * ranks_per_stage
    if len(ranks) % width:
        raise ValueError(f"{len(ranks)} ranks do not make whole pipelines of {num_stages} stages")
    grid = place_in_grid(ctx.rank, ranks, dp=len(ranks) // width, pp=num_stages, tp=ranks_per_stage)
    return PipelineGrid(
        ctx.rank,
        stages=grid.along("pp"),
        replicas=grid.along("dp"),
        shares=grid.along("tp"),
        first_pipeline=ranks[:width],
        reporter=ranks[width - ranks_per_stage],
    )
