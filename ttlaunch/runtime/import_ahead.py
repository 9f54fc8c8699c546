"""Import what the ranks of a recipe need, in the process that forks them for `--warm`.

Only code of ttlaunch and the packages that it stands on is imported: a recipe's own modules are read, and each rank imports them
itself. gRPC is left to the ranks, because its threads and locks do not survive a fork.
"""

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from ttlaunch.runtime.world import read_world

_ALWAYS = (
    "ttlaunch.runtime.entry",
    "ttlaunch.runtime.comm.clocks",
    "ttlaunch.runtime.comm.grpc.channels",
    "ttlaunch.runtime.comm.grpc.directory",
    "ttlaunch.runtime.comm.grpc.node_sums",
    "ttlaunch.runtime.comm.grpc.shared_state",
    "ttlaunch.runtime.comm.torch_group",
    "ttlaunch.runtime.context",
    "ttlaunch.runtime.telemetry.profile",
    "ttlaunch.runtime.training.one_process",
    "ttlaunch.recipe",
    "asyncio",
)
"""What ranks import beside the names of their trainer."""
_OFFERING = ("ttlaunch.train", "ttlaunch.runtime")


def import_ahead(plan_file: str) -> None:
    """Import what all ranks of a plan need, without starting a thread.

    Args:
        plan_file: The path of the plan of a recipe.

    Raises:
        Exception: Whatever an import raises; each rank would meet it too.
    """
    for module in _ALWAYS:
        import_module(module)
    train = import_module("ttlaunch.train")
    for name in sorted(set(_names_in(read_world(Path(plan_file)).recipe_folder)) & {*train.__all__, *train.OLD_NAMES}):
        getattr(train, name)
    if "grpc" in sys.modules:
        raise ImportError("gRPC is imported, which does not survive a fork")


def _names_in(folder: Path) -> Iterator[str]:
    """Yield the names that the modules of a recipe import from what trainers are offered; a broken module yields none."""
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in _OFFERING and not node.level:
                yield from (alias.name for alias in node.names)
