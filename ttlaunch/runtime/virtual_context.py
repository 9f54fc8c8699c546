"""The context of a rank on a virtual clock, which has no values to compare and nothing to write down."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.early_stop import make_early_stop
from ttlaunch.runtime.telemetry.records import ProgressWriter
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.world import Rank, World
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.sections import ConfigFile


def virtual_context(
    world: World,
    rank: Rank,
    communicator: Communicator,
    *,
    cfg: ConfigFile,
    corpus: Corpus | None,
    traffic: TrafficCounter | None = None,
) -> RankContext:
    """Return the context with which a rank runs its code; `cfg` and `corpus` are those of the run."""
    return _VirtualContext(
        world=world,
        rank=rank,
        communicator=communicator,
        records=_NoRecords(),
        device=torch.device("cpu"),
        corpus=corpus,
        early_stop=make_early_stop(cfg, None),
        traffic=traffic,
    )


class _VirtualContext(RankContext):
    """A rank without values: there is nothing to compare or to keep."""

    def report_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Report nothing."""


class _NoRecords(ProgressWriter):
    """Writes nothing: nobody follows ranks that end within seconds, and thousands of files would be many."""

    def __init__(self) -> None:
        """Open no file."""

    def write(self, kind: str, **values: object) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""
