"""The specification of a run before any file is read: the same for the command line, Python and restarts."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Self

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.recipe.recorded_epochs import RecordedEpoch
from ttlaunch.spec.recipe.recorded_updates import RecordedUpdate

LOCAL = "local"


@dataclass(frozen=True)
class RunSpec:
    """The specification of a run, as a user gives it by options.

    Attributes:
        target: A recipe's name, a folder, or a script; None if only the cluster is checked.
        on: The name or the folder of a configuration.
        config_file: The training file; None for the recipe's own `train.yaml`; `-` for standard input.
        overrides: Values of the configuration as `KEY=VALUE`.
        ranks: The number of ranks; None if the cluster or the recipe decides.
        mpi_args: Further arguments for the engine's command, as one text.
        engine: The name of the engine that starts the ranks; None to choose by the program.
        arguments: The arguments of a script or command.
        resume: The run or checkpoint from which training continues; None to begin at step 1.
        runs_dir: The folder that contains the run folders.
        is_command: Whether target and arguments are the command line of any program, given after `--`.
        trace_steps: How many steps ranks trace; None for no steps.
        profile_steps: The steps that torch's profiler records, such as `5-7`; None for no steps.
        excluded: Hosts of the hostfile that are not used, because they were lost or do not answer.
        replay: For each update of an asynchronous run that is repeated, the rank whose gradient made it.
        updates: For a run that is repeated in one process, what each of its updates was made of.
        epochs: For an elastic run with local steps that is repeated in one process, who took part from which step on.
        naive: Whether ranks run the recipe's `naive.py`.
        independent: Whether each rank of a script is meant to train by itself.
        env: Variables for all ranks as `NAME=VALUE`, or `NAME` for the value of the launching shell; may hold secrets.
        nproc_per_node: The number of ranks on each host, as torchrun's option of this name.
        nnodes: The number of hosts, likewise.
        standalone: Whether all hosts have to be this machine, likewise.
        nodes: The number of hosts to ask Slurm for.
        time_limit: How long to ask Slurm for them, as Slurm writes it.
        gres: Devices of each of these hosts, such as `gpu:2`.
        account: Slurm's account that pays.
        qos: Slurm's quality of service.
        allocation: The variables of the Slurm job that has given the hosts; None to take those of this process.
        warm: Whether the ranks of a Python program are forked from one process on each host, which has imported torch.
        first: How many ranks of a program start at first; the others can be added to the run. None: all.
        elastic: The least and the most workers of a recipe, as `MIN:MAX`, while workers come and go; None for a fixed number.
        audit: The share of steps in which ranks check each other's gradients, as `1/K`; None: as the configuration says.
    """

    target: str | None
    on: str = LOCAL
    config_file: str | None = None
    overrides: Sequence[str] = ()
    ranks: int | None = None
    hostfile: Path | None = None
    rank_bindings: Path | None = None
    mpi_args: str | None = None
    engine: str | None = None
    arguments: Sequence[str] = ()
    resume: str | None = None
    runs_dir: Path = Path("runs")
    is_command: bool = False
    trace_steps: int | None = None
    profile_steps: str | None = None
    excluded: Collection[str] = ()
    replay: tuple[int, ...] = ()
    updates: tuple[RecordedUpdate, ...] = ()
    epochs: tuple[RecordedEpoch, ...] = ()
    naive: bool = False
    independent: bool = False
    env: Sequence[str] = field(default=(), repr=False)
    nproc_per_node: str | None = None
    nnodes: str | None = None
    standalone: bool = False
    nodes: int | None = None
    time_limit: str | None = None
    gres: str | None = None
    account: str | None = None
    qos: str | None = None
    allocation: Mapping[str, str] | None = None
    warm: bool = False
    first: int | None = None
    elastic: str | None = None
    audit: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for another process of this version."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Make the specification from what `as_json` returned."""
        paths = {name: Path(record[name]) for name in ("hostfile", "rank_bindings", "runs_dir") if record[name]}
        tuples = {name: tuple(record[name]) for name in ("overrides", "arguments", "excluded", "replay", "env")}
        updates = tuple(
            RecordedUpdate(task, tuple((first, stop, version) for first, stop, version in parts))
            for task, parts in record.get("updates", ())
        )
        epochs = tuple(
            RecordedEpoch(step, tuple(members), tuple(came)) for step, members, came in record.get("epochs", ())
        )
        return cls(**{**record, **paths, **tuples, "updates": updates, "epochs": epochs})


def path_in(text: str, working_folder: Path) -> Path:
    """Make a path that the user wrote absolute; links and `..` are left to the system."""
    return working_folder / os.path.expanduser(text)  # noqa: PTH111 - this one never raises, whatever was typed


def short_name(path: Path, working_folder: Path) -> str:
    """Return a path relative to the working folder, or unchanged if it is elsewhere."""
    try:
        return str(path.relative_to(working_folder))
    except ValueError:
        return str(path)
