"""Make a `LaunchPlan` from a program, a topology, an engine and the shell's environment.

`recipe_plan.py` does this for a recipe. It is a separate file because it imports the code that reads recipes, which takes
a tenth of a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ttlaunch.diagnostics import Blame, Diagnostic, Label
from ttlaunch.diagnostics.count import counted
from ttlaunch.planning.engine import OverHosts, PlansCommands, RanksToStart
from ttlaunch.planning.environment import plan_environment, plan_rank_environment
from ttlaunch.planning.launch_plan import CommandProgram, LaunchPlan, RankRow, RecipeProgram
from ttlaunch.planning.room import more_ranks_than_slots
from ttlaunch.planning.secrets import hide_secrets
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.model import Topology
from ttlaunch.spec.topology.variables import MANAGED


@dataclass(frozen=True)
class Networks:
    """The networks of a run, in CIDR notation.

    Attributes:
        ranks: Networks for the ranks' messages; if empty, the engine chooses.
        control: Networks between the engine's daemons and the launching machine; if empty, the engine chooses.
        has_rdma: Whether every host has an RDMA device.
    """

    ranks: tuple[str, ...]
    control: tuple[str, ...]
    has_rdma: bool = False


@dataclass(frozen=True)
class Surroundings:
    """What planning needs to know of the launching machine; handed in so that planning stays pure.

    Attributes:
        working_folder: The user's current folder, in which ranks start too.
        shell: The environment of the command.
        python: Interpreter for shims and ranks.
        shim: Path of the shim.
        engine: What starts the ranks.
        engine_arguments: The user's own arguments for the engine's command.
        local_hosts: Names in the hostfile that mean this machine.
        networks: The networks between the hosts; None before the hosts have been probed.
    """

    working_folder: Path
    shell: Mapping[str, str]
    python: str
    shim: str
    engine: PlansCommands
    engine_arguments: tuple[str, ...] = ()
    local_hosts: frozenset[str] = frozenset()
    networks: Networks | None = None


def plan_command(
    program: CommandProgram, topology: Topology, surroundings: Surroundings, *, ranks: int | None
) -> LaunchPlan | Diagnostic:
    """Plan a program that is not a recipe: every rank runs the same command."""
    world_size = topology.world_size or ranks or 1
    if ranks is not None and ranks != world_size:
        span = topology.bindings[-1].span
        bound = counted(world_size, "rank")
        message = f"`--ranks {ranks}` was given but configuration `{topology.name}` binds {bound}"
        place = Label(span, f"the last of {counted(world_size, 'bound rank')}")
        return Diagnostic("P004", message, place, blame=Blame.COMMAND_LINE)
    if world_size > len(topology.slots):
        return more_ranks_than_slots(topology, world_size)
    return plan_program(
        program, topology, surroundings, command=program.command, roles=("rank",) * world_size, flows=()
    )


def plan_program(
    program: RecipeProgram | CommandProgram,
    topology: Topology,
    surroundings: Surroundings,
    *,
    command: tuple[str, ...],
    roles: Sequence[str],
    flows: tuple[tuple[str, str, str], ...],
) -> LaunchPlan:
    """Plan a program with one role per rank; `command` starts a rank, and the topology has a slot for each rank."""
    shell = surroundings.shell
    rows = tuple(_row(rank, role, topology) for rank, role in enumerate(roles))
    # This comes before anything is written or hashed: anybody who can read the run's folder can read the plan.
    hidden = hide_secrets(
        plan_environment(topology, shell=shell, working_folder=surroundings.working_folder),
        [row.environment for row in rows],
        program.config if isinstance(program, RecipeProgram) else None,
        shell=shell,
        command=command,
    )
    if isinstance(program, CommandProgram):
        program = replace(program, command=hidden.command)
    rows = tuple(replace(row, environment=own) for row, own in zip(rows, hidden.rows, strict=True))
    used = {row.host for row in rows}  # the engine would start a useless daemon on any other host
    hosts = [host for host in topology.hosts if host.name in used]
    slots = [(f"{host.user}@{host.name}" if host.user else str(host.name), host.slots) for host in hosts]
    to_start = RanksToStart(
        python=surroundings.python,
        shim=surroundings.shim,
        rows=rows,
        slots=slots,
        arguments=surroundings.engine_arguments,
        over_hosts=_over_hosts(rows, topology, surroundings),
    )
    return LaunchPlan(
        topology=topology.name,
        program=program,
        rank_command=hidden.command,
        working_folder=str(surroundings.working_folder),
        environment=hidden.environment,
        managed=tuple(sorted(MANAGED)),
        ranks=rows,
        flows=flows,
        links=tuple((link.a, link.b, link.channels) for link in topology.links),
        engine=surroundings.engine.command(to_start),
        secrets=hidden.secrets,
    )


def _over_hosts(rows: Sequence[RankRow], topology: Topology, surroundings: Surroundings) -> OverHosts | None:
    if all(row.host in surroundings.local_hosts for row in rows):
        return None
    networks = surroundings.networks or Networks((), ())
    folder = topology.cluster.remote_folder
    return OverHosts(folder, networks.ranks, networks.control, has_rdma=networks.has_rdma)


def _row(rank: int, role: str, topology: Topology) -> RankRow:
    slot = topology.slots[rank]
    binding = topology.bindings[rank] if topology.bindings else None
    mesh = topology.driven(binding) if binding else None
    return RankRow(
        rank=rank,
        host=str(slot.host.name),
        slot=slot.index,
        role=role,
        mesh_id=mesh.id if mesh else None,
        mesh_host_rank=binding.mesh_host_rank if binding else None,
        device_shape=_shape_on_one_host(mesh.device_shape, mesh.host_shape) if mesh else None,
        environment=plan_rank_environment(rank, binding, topology),
    )


def _shape_on_one_host(devices: tuple[int, int], hosts: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of devices of one host, given those of the mesh and the grid of its hosts."""
    return devices[0] // hosts[0], devices[1] // hosts[1]
