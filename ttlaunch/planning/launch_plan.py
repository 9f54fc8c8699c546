"""`LaunchPlan`: everything that planning decides, as one frozen value, which shims and ranks read from `plan.json`.

Its hash covers everything that decides what the run computes and where, and nothing else: no time, no run id, no run
folder. Equal inputs give equal hashes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from ttlaunch import contract
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.recipe.recorded_epochs import RecordedEpoch
from ttlaunch.spec.recipe.recorded_updates import RecordedUpdate

GRPC_PACKAGES = ("crc32c", "grpcio")
"""What ranks import that exchange their messages over gRPC, instead of mpi4py."""


@dataclass(frozen=True)
class RankRow:
    """One rank: where it runs, what it drives, what it does.

    Attributes:
        slot: Index of the slot on its host, which is also the rank's local rank.
        mesh_id: The mesh that the rank drives; None in a topology without a mesh graph.
        mesh_host_rank: The number of the rank's host within the mesh; None if the bindings do not give it.
        device_shape: Rows and columns of the devices that the rank drives.
        environment: Variables for this rank alone; `LaunchPlan.environment` has those for all ranks.
        later: Whether the rank starts only when it is added to the run, if it ever is; needs an engine with `ADD_RANK`.
    """

    rank: int
    host: str
    slot: int
    role: str
    mesh_id: int | None = None
    mesh_host_rank: int | None = None
    device_shape: tuple[int, int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    later: bool = False


@dataclass(frozen=True)
class RecipeProgram:
    """The ranks run a recipe's role functions.

    Attributes:
        folder: The folder of `recipe.py` and `trainer.py`.
        config: The resolved configuration as JSON.
        data: Path, SHA-256 and size of the training text; None if the recipe reads none.
        start: The weights that training begins with: `origin`, `step`, `files` (path, SHA-256 and size of each) and, for
            a checkpoint, its `state` and the reasons why newer ones are not used. None if weights are drawn from the seed.
        replay: For a repeated asynchronous run, the rank whose gradient made each update; otherwise empty.
        updates: For a run that is repeated in one process, what each of its updates was made of; otherwise empty.
        epochs: For an elastic run with local steps that is repeated in one process, who took part from which step on; otherwise empty.
        is_naive: Whether ranks run `naive.py` in place of `trainer.py`.
        warm: Whether the ranks are forked from one process on each host, which has imported torch and the code of ttlaunch.
    """

    name: str
    folder: str
    layout: str
    config: Mapping[str, Any]
    data: Mapping[str, Any] | None
    start: Mapping[str, Any] | None = None
    replay: tuple[int, ...] = ()
    updates: tuple[RecordedUpdate, ...] = ()
    epochs: tuple[RecordedEpoch, ...] = ()
    is_naive: bool = False
    warm: bool = False

    @property
    def uses_grpc(self) -> bool:
        """Whether ranks exchange their messages over gRPC, and not by MPI or what MPI has set up."""
        return bool(self.config["multihost_config"]["socket_type"] == "grpc")

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages that ranks import, by their names on the package index."""
        return ("torch", *(GRPC_PACKAGES if self.uses_grpc else ("mpi4py",)), "numpy", "pydantic")


@dataclass(frozen=True)
class CommandProgram:
    """The ranks run a program that is not a recipe.

    Attributes:
        is_python: Whether it is a Python program, whose ranks get the variables that torchrun sets.
        uses_mpi: Whether a Python program names MPI, so that its ranks keep the engine's variables.
        is_independent: Whether each rank is meant to train by itself.
        warm: Whether the ranks of a Python program are forked from one process on each host, which has imported torch.
    """

    name: str
    command: tuple[str, ...]
    is_python: bool = False
    uses_mpi: bool = True
    is_independent: bool = False
    warm: bool = False


@dataclass(frozen=True)
class EngineNames:
    """An engine's names for its variables, processes and files, for code that must not know the engine.

    The plan's hash leaves these names out, because the engine and its version determine them.

    Attributes:
        launcher: The name of the process that starts ranks.
        rank_variables: The variables in which it tells a process its rank; the first one that is set counts.
        network_variables: The variables in which it tells ranks the networks to use; the first one that is set counts.
        interface_variables: The variables that name the network interface for its library, on the host of each rank.
        folder_variables: The variables that name the folders for its own files.
        remote_shell_variable: The variable that names the command with which it reaches hosts; empty if it reaches none
            itself.
        daemons: Names of its processes, which are ended after the ranks.
        folders: Patterns of its folders for temporary files, which a run must not leave behind.
        segments: Patterns of its files in shared memory, which a run must not leave behind.
        own_segments: Those of its files in shared memory that it does not put into the run's folder.
        rank_listeners: Socket options (level, name, value) that tell sockets on which its library listens in ranks from those
            on which the ranks' own programs listen; empty if its library does not listen.
        abort_message: Regular expression for the line that its library writes to a rank's standard error before the engine kills all
            shims on the rank's demand; its first group is the status. Empty if the engine lets shims record the end.
        place_prefixes: Beginnings of the variables that say which rank a process is and of how many, as it or, if it has no MPI,
            another engine sets them.
        rank_prefixes: Prefixes of the variables in which it tells its library about the ranks, or another engine's tell theirs.
        key: The name by which `--engine` chooses it.
        has_mpi: Whether its ranks can find each other through MPI.
    """

    launcher: str
    rank_variables: tuple[str, ...]
    network_variables: tuple[str, ...] = ()
    interface_variables: tuple[str, ...] = ()
    folder_variables: tuple[str, ...] = ()
    remote_shell_variable: str = ""
    daemons: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    own_segments: tuple[str, ...] = ()
    rank_listeners: tuple[tuple[int, int, int], ...] = ()
    abort_message: str = ""
    place_prefixes: tuple[str, ...] = ()
    rank_prefixes: tuple[str, ...] = ()
    key: str = ""
    has_mpi: bool = True


@dataclass(frozen=True)
class EngineCommand:
    """How an engine is asked to start the shims: an argument list that does not grow with the ranks.

    Attributes:
        name: Such as `Open MPI 5.0.11`.
        argv: The command, which runs in the folder of `files`.
        environment: Variables for the engine itself, none of which holds a value that the user gave.
        files: The text of each file by name; they are written beside `plan.json`.
        by_hand: Script that starts one rank with the launching machine's paths, for users who start the command
            themselves on hosts with the same paths. None if `argv` already starts the ranks in this way.
        names: The engine's names for its variables, processes and files.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    by_hand: str | None = None
    names: EngineNames = field(kw_only=True)


@dataclass(frozen=True)
class ElasticLimits:
    """How far the workers of a run may come and go.

    Attributes:
        minimum: The least workers with which a step is made.
        maximum: The most; further workers are spares.
        micro_batches: Those of a step.
        first: The number of workers that start with the run; the other rows of the plan are for workers that replace others.
        slots: Into how many slots the state is cut that not every worker keeps, 0 for as many as there are workers; None: every
            worker has all of it.
        servers: How many workers keep slots and differentiate no micro-batches.
        has_local_steps: Whether workers take steps of their own, so that the bits follow from who takes part.
        shadow_bytes: How many bytes of each parameter all shadows together keep; 0 if there are none, or it is not known.
        kept_bytes: How many bytes of each parameter each worker keeps of the last step, for one that lacks it; 0 if none, or not known.
    """

    minimum: int
    maximum: int
    micro_batches: int
    first: int
    slots: int | None = None
    servers: int = 0
    has_local_steps: bool = False
    shadow_bytes: int = 0
    kept_bytes: int = 0

    @property
    def hands_out_tasks(self) -> bool:
        """Whether a server alone has the state, and hands out the data of steps to the others."""
        return self.servers > 0 and self.slots is None

    def as_json(self) -> dict[str, int]:
        """Return it as plans and other machines have it; what few recipes have only where there is some."""
        rare = {"slots": None, "servers": 0, "has_local_steps": False, "shadow_bytes": 0, "kept_bytes": 0}
        return {name: number for name, number in asdict(self).items() if name not in rare or number != rare[name]}


@dataclass(frozen=True)
class LaunchPlan:
    """The complete, checked description of what will be started.

    Attributes:
        environment: Variables for all ranks.
        managed: Names of variables that ranks get only from the plan, never from their host.
        flows: The roles that exchange messages: source, target, and the pattern of the pairs of ranks.
        links: Two linked meshes and the number of channels between them.
        elastic: For a run whose workers may come and go; None for a fixed world.
        secrets: The values for `env:NAME` in environments and configuration; never written, shown or hashed.
    """

    topology: str
    program: RecipeProgram | CommandProgram
    rank_command: tuple[str, ...]
    working_folder: str
    environment: Mapping[str, str]
    managed: tuple[str, ...]
    ranks: tuple[RankRow, ...]
    flows: tuple[tuple[str, str, str], ...]
    links: tuple[tuple[int, int, int], ...]
    engine: EngineCommand
    elastic: ElasticLimits | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def first_ranks(self) -> tuple[RankRow, ...]:
        """Return the ranks that start with the run."""
        return tuple(row for row in self.ranks if not row.later)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts that ranks run on, in rank order, each once."""
        return tuple(dict.fromkeys(row.host for row in self.ranks))

    @property
    def last_checkpoint_step(self) -> int:
        """Return the last step after which ranks may save a checkpoint; 0 if they save none."""
        config = self.program.config if isinstance(self.program, RecipeProgram) else {}
        interval = config.get("checkpoint_config", {}).get("interval")
        return 0 if interval is None else int(config.get("training_config", {}).get("steps", 0))

    def _repr_html_(self) -> str:
        """Return a table with a row for each rank: its role and its place."""
        from ttlaunch.diagnostics.html import table_html  # noqa: PLC0415 - only notebooks need it

        rows = [
            (row.rank, row.role, row.host, row.slot, "–" if row.mesh_id is None else row.mesh_id) for row in self.ranks
        ]
        return table_html(("rank", "role", "host", "slot", "mesh"), rows)

    def as_json(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        content = self._content()
        engine = {**content["engine"], "names": asdict(self.engine.names)}
        return {"format": contract.PLAN_FORMAT, "hash": _digest(content), **content, "engine": engine}

    @property
    def hash(self) -> str:
        return _digest(self._content())

    def _content(self) -> dict[str, Any]:
        recipe = self.program if isinstance(self.program, RecipeProgram) else None
        command = self.program if isinstance(self.program, CommandProgram) else None
        rows = [_row(row) for row in self.ranks]
        engine = asdict(self.engine)
        del engine["names"]
        return {
            "topology": self.topology,
            "recipe": {"name": recipe.name, "folder": recipe.folder} if recipe else None,
            "command": {"name": command.name, "command": list(command.command)} if command else None,
            **({"independent": True} if command and command.is_independent else {}),
            **({"python": _python(command)} if command and command.is_python else {}),
            "layout": recipe.layout if recipe else None,
            "world_size": self.world_size,
            "config": recipe.config if recipe else None,
            "data": recipe.data if recipe else None,
            "start": recipe.start if recipe else None,
            **({"replay": list(recipe.replay)} if recipe and recipe.replay else {}),
            **({"updates": list(recipe.updates)} if recipe and recipe.updates else {}),
            **({"epochs": list(recipe.epochs)} if recipe and recipe.epochs else {}),
            **({"naive": True} if recipe and recipe.is_naive else {}),
            **({"warm": True} if self.program.warm else {}),
            "rank_command": list(self.rank_command),
            "working_folder": self.working_folder,
            "environment": dict(self.environment),
            "managed": list(self.managed),
            "ranks": rows,
            "flows": [list(flow) for flow in self.flows],
            "links": [list(link) for link in self.links],
            **({"elastic": self.elastic.as_json()} if self.elastic else {}),
            "engine": engine,
        }


def _row(row: RankRow) -> dict[str, Any]:
    content = {**asdict(row), "local_rank": row.slot}
    if not row.later:
        del content["later"]  # a plan keeps the hash that it had before ranks could start later
    return content


def is_python(plan: LaunchPlan) -> bool:
    """Whether the ranks run a Python program, so that they get the variables that torchrun sets."""
    return isinstance(plan.program, CommandProgram) and plan.program.is_python


def _python(program: CommandProgram) -> dict[str, bool]:
    return {"uses_mpi": program.uses_mpi}


def render_plan_json(plan: LaunchPlan) -> str:
    """Write `plan.json`, one line per key at the top so that two plans can be compared by eye."""
    return json.dumps(plan.as_json(), indent=1, sort_keys=False) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
