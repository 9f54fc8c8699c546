"""Replace `start_ranks.py` by a process that imports torch and forks the ranks, for `--warm`.

It is the ranks' interpreter, started with their command line and the variables that they share. As in every rank, Python
imports `at_start/sitecustomize.py` there before the program, and that goes on in `forked_rank.py`.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import json
import os
import re

from ttlaunch import contract
from ttlaunch.agent import shim

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Record = dict[str, Any]

_OF_ONE_RANK = {
    *(contract.ENV_RANK, contract.ENV_LOCAL_RANK, contract.ENV_ROLE, contract.ENV_HOST, contract.ENV_EXCEPTIONS),
    *(*contract.TORCH_PLACE, "ROLE_NAME", "TORCHELASTIC_ERROR_FILE"),
    *("TT_RUN_RANK", "TT_MESH_ID", "TT_MESH_HOST_RANK", "TT_MESH_GRAPH_DESC_PATH"),
}
"""Variables that may differ between ranks: nothing reads them while torch is imported."""
_OF_RECIPES = ("ttlaunch.runtime.import_ahead", "import_ahead")
"""The module and the function that import what ranks of a recipe share; other ranks share torch."""
_HARMLESS = re.compile(r"-[uOBbdqRPs]+")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def replace_by_warm(
    plan: Record,
    plan_path: str,
    rows: Sequence[Record],
    *,
    later: Sequence[Record] = (),
    orders: tuple[int, bytes] | None = None,
) -> str:
    """Replace this process by one that imports torch and forks the ranks; returns only if that cannot be done, with the reason.

    Args:
        plan: The content of the plan.
        plan_path: Its file.
        rows: The ranks to start.
        later: Ranks that `orders` may have it start later.
        orders: The pipe with further orders, and what has been read from it already; None if there are none.
    """
    try:
        command, folder = contract.fill_command(plan["rank_command"], os.environ), plan["working_folder"]
        run_folder, inherited = os.path.dirname(plan_path), dict(os.environ)
        environments = {
            row["rank"]: shim.rank_environment(plan, row, inherited, run_folder=run_folder, plan_path=plan_path)
            for row in (*rows, *later)
        }
        cold = _ranks_that_differ(environments)
        warm = [environment for rank, environment in environments.items() if rank not in cold]
        common = {name: value for name, value in warm[0].items() if all(one.get(name) == value for one in warm)}
        program, reason = _interpreter(command, common, folder)
        if reason:
            return reason
        os.chdir(folder)
    except (OSError, LookupError) as error:
        return str(getattr(error, "strerror", None) or error)
    # Ranks show their own variables in /proc, so this process needs room for the longest of them.
    room = max(len(environment_block(one)) for one in warm) - len(environment_block(common))
    state = {"inherited": inherited, "plan": plan_path, "ranks": [row["rank"] for row in rows], "cold": cold}
    state["first"] = next(iter(environments))
    if plan["recipe"] is not None:
        state["import"] = _OF_RECIPES
        common.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # more would be threads before the forks; a rank sets the number for torch itself
    state["program_folder"] = _program_folder(command, folder)
    if orders is not None and later:
        os.set_inheritable(orders[0], True)  # noqa: FBT003 - as Python has it
        state["orders"] = [orders[0], orders[1].decode()]
    return _execute(program, command, common, state=state, room=room)


def _execute(
    program: str, command: list[str], environment: dict[str, str], *, state: Mapping[str, object], room: int
) -> str:
    """Replace this process by a program that finds `state` in a file of its own; returns only if that cannot be started, with the reason."""
    output, (printed, streams), descriptor = (os.dup(1), os.dup(2)), os.pipe(), os.memfd_create("ttlaunch-warm", 0)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps({**state, "output": output, "printed": printed}).encode())
    for inherited in (*output, printed):
        os.set_inheritable(inherited, True)  # noqa: FBT003 - as Python has it
    # Python decides by the kind of its streams how it buffers them, and those of ranks are pipes.
    os.dup2(streams, 1)
    os.dup2(streams, 2)
    os.close(streams)
    try:
        os.execve(program, command, {**environment, contract.ENV_WARM: f"{descriptor}:{'.' * room}"})  # noqa: S606 - as ranks do
    except OSError as error:
        for number, kept in enumerate(output, 1):
            os.dup2(kept, number)
        return f"{program} cannot be started: {error.strerror}"


def _ranks_that_differ(environments: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """Return the ranks whose variables differ from the first one's in what torch may read while it is imported, each with one of them."""
    first = next(iter(environments.values()))
    found = {}
    for rank, environment in environments.items():
        names = sorted(
            name for name in {*first, *environment} - _OF_ONE_RANK if first.get(name) != environment.get(name)
        )
        if names:
            found[rank] = names[0]
    return found


def _interpreter(command: Sequence[str], environment: Mapping[str, str], folder: str) -> tuple[str, str]:
    """Return the path of the interpreter that a command starts, or why it certainly imports nothing of ours.

    It would run the program in place of starting the ranks.
    """
    name = command[0]
    places = [folder] if "/" in name else os.get_exec_path(environment)
    paths = [os.path.join(place, name) for place in places]
    path = next((one for one in paths if os.path.isfile(one) and os.access(one, os.X_OK)), "")
    if not path:
        return "", f"there is no {name}"
    with open(path, "rb") as file:
        if file.read(4) != b"\x7fELF":
            return "", f"{name} is a script, which may start Python with other options and variables"
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        option = words.pop(0)
        if option in _WITH_VALUE and words:
            words.pop(0)
        elif not (_HARMLESS.fullmatch(option) or option.startswith(("-X", "-W"))):
            return "", f"Python's option `{option}` keeps it from starting ranks in another way"
    return path, "" if words else "no program is named"


def _program_folder(command: Sequence[str], folder: str) -> str:
    """Return the folder in which a program's imports are looked for first."""
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        words = words[2:] if words[0] in _WITH_VALUE else words[1:]
    script = words[0] if words and not words[0].startswith("-") else ""
    return os.path.dirname(os.path.realpath(os.path.join(folder, script))) if script else folder


def environment_block(environment: Mapping[str, str]) -> bytes:
    """Return variables as the kernel has them at the start of a process."""
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
