"""The variables that torchrun sets for its workers, for each rank of a Python program.

A script that torchrun starts therefore runs unchanged: `init_process_group()`, Accelerate, Lightning and Transformers read these
variables. `docs/how-to/run-your-pytorch-script.md` lists what differs from torchrun. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os
import socket

from ttlaunch import contract
from ttlaunch.agent import listeners
from ttlaunch.agent.probe import gpu_files, interface_of

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"
_RESTARTS, _MOST_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"


def torch_world(
    plan: Mapping[str, Any], row: Mapping[str, Any], inherited: Mapping[str, str], *, run_folder: str
) -> dict[str, str]:
    """Return the variables of one rank that name its place among all ranks; the same as torchrun's for the same ranks."""
    rows, hosts = plan["ranks"], list(dict.fromkeys(other["host"] for other in plan["ranks"]))
    world, here = str(plan["world_size"]), sum(other["host"] == row["host"] for other in rows)
    same_role = [other["rank"] for other in rows if other["role"] == row["role"]]
    group = str(hosts.index(row["host"]))
    variables = {
        "RANK": str(row["rank"]),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(row["local_rank"]),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "NODE_RANK": group,
        "ROLE_NAME": row["role"],
        "ROLE_RANK": str(same_role.index(row["rank"])),
        "ROLE_WORLD_SIZE": str(len(same_role)),
        _RESTARTS: inherited.get(contract.ENV_RESTARTS, "0"),
        _MOST_RESTARTS: inherited.get(contract.ENV_MOST_RESTARTS, "0"),
        "TORCHELASTIC_RUN_ID": inherited.get(contract.ENV_RUN_ID, contract.BY_HAND),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store itself
        "TORCHELASTIC_ERROR_FILE": os.path.join(run_folder, contract.torch_error_file(row["rank"])),
    }
    # Ranks that were started by hand have no launcher that chose these two, and keep the user's.
    for name, chosen in ((_ADDRESS, contract.ENV_MASTER_ADDR), (_PORT, contract.ENV_MASTER_PORT)):
        if chosen in inherited:
            variables[name] = inherited[chosen]
    return variables


def torch_defaults(
    plan: Mapping[str, Any], row: Mapping[str, Any], inherited: Mapping[str, str], *, networks: str | None
) -> dict[str, str]:
    """Return the variables that a rank gets only if its host or the user does not set them.

    Args:
        plan: The content of the plan.
        row: The rank's row of it.
        inherited: The variables that the rank inherits.
        networks: The networks chosen for ranks, in CIDR notation; None if none were chosen.
    """
    rows = plan["ranks"]
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if sum(other["host"] == row["host"] for other in rows) > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    # Without this variable, Accelerate on CPUs trains in each rank by itself.
    if all(other.get("device_shape") is None for other in rows) and not gpu_files():
        defaults["ACCELERATE_USE_CPU"] = "true"
    defaults.update(_interfaces_of_libraries(networks))
    return {name: value for name, value in defaults.items() if name not in inherited}


def _interfaces_of_libraries(networks: str | None) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the networks chosen for ranks; empty if there are none.

    Without them, gloo uses the address of the host's own name, which is often one that no other host can reach.
    """
    name = interface_in(networks) if networks else None
    return (
        {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    )  # `=`: this name, not a prefix


def interface_in(networks: str) -> str | None:
    """Return the name of this machine's interface in networks of CIDR notation; None if it has none there, or several."""
    own = listeners.addresses_in(networks).get(int(socket.AF_INET))
    return interface_of(own) if own else None
