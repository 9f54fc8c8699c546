"""What a rank knows of the plan: which rank is where and does what, the configuration and the data. No torch."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NewType

from ttlaunch import contract
from ttlaunch.spec.recipe.recorded_epochs import RecordedEpoch
from ttlaunch.spec.recipe.recorded_updates import RecordedUpdate

Rank = NewType("Rank", int)
"""A process's index in the world, from 0."""


@dataclass(frozen=True)
class World:
    """The part of `plan.json` that ranks read.

    Attributes:
        roles: The role of each rank.
        hosts: The host of each rank.
        local_ranks: The index of each rank on its host.
        config: The resolved training file, not yet validated.
        data_path: The training text; None for the default one.
        data_sha256: What the launching machine's text hashes to; None if the recipe reads no text.
        start: What training begins from, as the launcher found it: `step`, `files` (path and SHA-256 of each) and, of a
            checkpoint, its `state`; None: weights are drawn from the seed.
        replay: For a repeated asynchronous run, the rank whose gradient made each update; else empty.
        updates: For a run that is repeated in one process, what each of its updates was made of, in order; else empty.
        epochs: For an elastic run with local steps that is repeated in one process, who took part from which step on; else empty.
        trainer: The file of the recipe's folder that has the roles' functions, without `.py`.
        is_elastic: Whether workers come and go; ranks are then their numbers for life, see `ttlaunch/membership`.
        later: For each rank, whether it starts only when it is added to the run.
    """

    recipe_folder: Path
    layout: str
    roles: tuple[str, ...]
    hosts: tuple[str, ...]
    local_ranks: tuple[int, ...]
    config: dict[str, Any]
    data_path: Path | None
    data_sha256: str | None
    start: Mapping[str, Any] | None = None
    replay: tuple[int, ...] = ()
    updates: tuple[RecordedUpdate, ...] = ()
    epochs: tuple[RecordedEpoch, ...] = ()
    trainer: str = "trainer"
    is_elastic: bool = False
    later: tuple[bool, ...] = ()

    @property
    def size(self) -> int:
        return len(self.roles)

    @property
    def uses_mpi(self) -> bool:
        """Whether ranks exchange messages by MPI, or by what MPI has set up."""
        return bool(self.config["multihost_config"]["socket_type"] != "grpc")

    def ranks(self, role: str) -> tuple[Rank, ...]:
        """The ranks that have the role, in order."""
        return tuple(Rank(rank) for rank, its_role in enumerate(self.roles) if its_role == role)

    def is_oversubscribed(self, rank: Rank) -> bool:
        """Whether the rank's host runs more ranks than the rank may use cores: then a wait must not burn one."""
        return self.hosts.count(self.hosts[rank]) > len(os.sched_getaffinity(0))


def _update(task: int, parts: list[list[int]]) -> RecordedUpdate:
    return RecordedUpdate(task, tuple((first, stop, version) for first, stop, version in parts))


def _epoch(step: int, members: list[int], came: list[int]) -> RecordedEpoch:
    return RecordedEpoch(step, tuple(members), tuple(came))


def read_world(path: Path) -> World:
    """Read the plan that the launcher wrote.

    Raises:
        ValueError: The plan has another format than this runtime understands.
    """
    plan = json.loads(path.read_text(encoding="utf-8"))
    if plan["format"] != contract.PLAN_FORMAT:
        raise ValueError(f"{path} has plan format {plan['format']}; this runtime reads {contract.PLAN_FORMAT}")
    rows = sorted(plan["ranks"], key=lambda row: int(row["rank"]))
    data: Mapping[str, Any] = plan.get("data") or {}
    return World(
        recipe_folder=Path(plan["recipe"]["folder"]),
        layout=plan["layout"],
        roles=tuple(row["role"] for row in rows),
        hosts=tuple(row["host"] for row in rows),
        local_ranks=tuple(int(row["local_rank"]) for row in rows),
        config=plan["config"],
        data_path=Path(data["path"]) if data.get("path") else None,
        data_sha256=data.get("sha256"),
        start=plan.get("start"),
        replay=tuple(plan.get("replay") or ()),
        updates=tuple(_update(*one) for one in plan.get("updates") or ()),
        epochs=tuple(_epoch(*one) for one in plan.get("epochs") or ()),
        trainer="naive" if plan.get("naive") else "trainer",
        is_elastic=bool(plan.get("elastic")),
        later=tuple(bool(row.get("later")) for row in rows),
    )
