"""The specification of a run before anything is read: the same for the command line, Python and restarts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

LOCAL = "local"


@dataclass(frozen=True)
class RunSpec:
    """What a user asked for.

    Attributes:
        target: A recipe's name, a folder, or a script; None: only the cluster is of interest.
        on: Configuration's name or folder.
        config_file: `-c`; None: the recipe's own `train.yaml`; `-`: standard input.
        mpi_args: Words for the engine's command.
        arguments: The arguments of a script or command.
        resume: What to go on from; None: nothing.
        runs_dir: Where run folders are.
        is_command: Whether target and arguments are any program's command line, given after `--`.
        trace_steps: How many steps ranks are to trace; None: none.
        profile_steps: The steps that torch's profiler records, such as `5-7`; None: no steps.
        replay: Where the gradients of an asynchronous run came from that is repeated, by update.
        naive: Whether ranks run the recipe's `naive.py`.
        without: Hosts of the hostfile that are not to be used, since they were lost.
    """

    target: str | None
    on: str = LOCAL
    config_file: str | None = None
    overrides: Sequence[str] = ()
    ranks: int | None = None
    hostfile: Path | None = None
    rank_bindings: Path | None = None
    mpi_args: str | None = None
    arguments: Sequence[str] = ()
    resume: str | None = None
    runs_dir: Path = Path("runs")
    is_command: bool = False
    trace_steps: int | None = None
    profile_steps: str | None = None
    without: Collection[str] = ()
    replay: tuple[int, ...] = ()
    naive: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for another process of this version."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild what `as_json` returned."""
        paths = {name: Path(record[name]) for name in ("hostfile", "rank_bindings", "runs_dir") if record[name]}
        tuples = {name: tuple(record[name]) for name in ("overrides", "arguments", "without", "replay")}
        return cls(**{**record, **paths, **tuples})


def short_name(path: Path, working_folder: Path) -> str:
    """Return a path as the user would type it."""
    try:
        return str(path.relative_to(working_folder))
    except ValueError:
        return str(path)
