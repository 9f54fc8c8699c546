"""Choose the engine that starts a run's ranks.

`ENGINES` registers them: another engine is a file and a line here, see `docs/how-to/add-an-engine.md`.
"""

from collections.abc import Sequence

from ttlaunch.diagnostics import Diagnostic
from ttlaunch.engines.base import Engine, EngineFinder
from ttlaunch.engines.hydra import INTEL, MPICH, HydraFinder
from ttlaunch.engines.openmpi import OpenMpiFinder

ENGINES: tuple[EngineFinder, ...] = (OpenMpiFinder(), HydraFinder(MPICH), HydraFinder(INTEL))
"""All engines in order of preference: the first one that the launching machine has starts its runs.

Hosts are checked for the first engine of the list, and only that one understands a user's arguments for its command.
"""


def find_engine(
    *,
    python: str,
    search_path: str | None,
    gets_arguments: bool = False,
    engines: Sequence[EngineFinder] = ENGINES,
) -> Engine | Diagnostic:
    """Find the engine to use on this machine; if there is none, return the diagnostic about the preferred engine.

    Args:
        python: Interpreter of the ranks.
        search_path: `PATH` of the shell; None for that of this process.
        gets_arguments: Whether the user gives arguments for its command, which only the preferred engine understands.
        engines: The engines to look for, in order of preference.
    """
    answers = []
    for finder in engines[:1] if gets_arguments else engines:
        answer = finder.find(python=python, search_path=search_path)
        if not isinstance(answer, Diagnostic):
            return answer
        answers.append(answer)
    return answers[0]
