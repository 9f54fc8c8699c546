"""Choose the engine that starts a run's ranks.

`ENGINES` registers them: another engine is a file and a line here, see `docs/how-to/add-an-engine.md`.
"""

from collections.abc import Sequence

from ttlaunch.diagnostics import Diagnostic, did_you_mean, listed, shown, usage_mistake
from ttlaunch.engines.agents import AgentsFinder
from ttlaunch.engines.base import Capability, Engine, EngineFinder
from ttlaunch.engines.hydra import HydraFinder
from ttlaunch.engines.openmpi import OpenMpiFinder
from ttlaunch.planning.engine import EngineSignature

ENGINES: tuple[EngineFinder, ...] = (OpenMpiFinder(), HydraFinder(), AgentsFinder())
"""All engines in order of preference: the first suitable one that the launching machine has starts its runs.

Hosts are checked for the first engine of the list unless another one is to start the ranks.
"""


def engine_named(key: str) -> EngineFinder | Diagnostic:
    """Return the engine that `--engine` names."""
    found = next((finder for finder in ENGINES if finder.key == key), None)
    if found is not None:
        return found
    keys = [finder.key for finder in ENGINES]
    message = f"there is no engine `{shown(key)}`; {listed(keys, last='or')} was expected"
    if key == "slurm":
        return usage_mistake(
            message, "`--on slurm:PARTITION` runs on hosts that Slurm gives; the engine is another question"
        )
    return usage_mistake(message, *did_you_mean(key, keys))


def suitable_engines(*, uses_mpi: bool) -> list[EngineFinder]:
    """Return the engines to look for if `--engine` names none: those with MPI, or those that start ranks without it."""
    return [finder for finder in ENGINES if (Capability.MPI in finder.can) is uses_mpi]


def engine_of_hosts(*, python: str, search_path: str | None) -> EngineSignature:
    """Return the engine for which hosts are checked and prepared when no run says which: this machine's, or the preferred one."""
    found = find_engine(python=python, search_path=search_path, engines=suitable_engines(uses_mpi=True))
    return ENGINES[0].signature if isinstance(found, Diagnostic) else found.signature


def find_engine(*, python: str, search_path: str | None, engines: Sequence[EngineFinder]) -> Engine | Diagnostic:
    """Find the engine to use on this machine; if there is none, return the diagnostic about the preferred engine.

    Args:
        python: Interpreter of the ranks.
        search_path: `PATH` of the shell; None for that of this process.
        engines: The engines to look for, in order of preference.
    """
    answers = []
    for finder in engines:
        answer = finder.find(python=python, search_path=search_path)
        if not isinstance(answer, Diagnostic):
            return answer
        answers.append(answer)
    return answers[0]
