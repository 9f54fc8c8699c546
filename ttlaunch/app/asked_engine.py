"""The engine that a run's specification asks for, and what follows from it for the program.

Engines are imported only if one is asked for: reading a cluster's description takes less time without them.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ttlaunch.app.python_program import PythonProgram
from ttlaunch.diagnostics import Blame, Diagnostic, Severity, shown

if TYPE_CHECKING:
    from ttlaunch.engines.base import Engine, EngineFinder


def asked_engine(key: str | None) -> tuple["EngineFinder | None", list[Diagnostic]]:
    """Return the engine of this name, or the mistake that there is none; None if the specification names no engine."""
    if key is None:
        return None, []
    from ttlaunch.engines.choose import engine_named

    found = engine_named(key)
    return (None, [found]) if isinstance(found, Diagnostic) else (found, [])


def refuse_recipe(engine: "EngineFinder | None", *, uses_mpi: bool) -> list[Diagnostic]:
    """Refuse an engine that cannot start the ranks of a recipe.

    Args:
        engine: The engine that the specification names; None if it names none.
        uses_mpi: Whether the ranks exchange their messages by MPI.
    """
    if engine is None or _has_mpi(engine) is uses_mpi:
        return []
    hints = ["leave `--engine` out: the recipe gets an engine that suits it"]
    if uses_mpi:
        message = f"the recipe exchanges its messages by MPI, which engine `{engine.key}` does not have"
        hints.append("or `--set multihost_config.socket_type=grpc`, which needs no MPI")
    else:
        message = f"the recipe exchanges its messages by gRPC, and engine `{engine.key}` starts ranks that use MPI"
    return [Diagnostic("P057", message, hints=tuple(hints), blame=Blame.COMMAND_LINE)]


def with_engine(program: PythonProgram, engine: "EngineFinder | None") -> tuple[PythonProgram, str]:
    """Return whether a Python program gets MPI, which the engine decides if one is asked for, and a clause that says why."""
    if engine is not None and _has_mpi(engine) is not program.uses_mpi:
        why = f"has no MPI, although {program.why}" if program.uses_mpi else "gives them MPI"
        return replace(program, uses_mpi=not program.uses_mpi), f"engine `{engine.key}` {why}"
    if program.uses_mpi:
        return program, f"{program.why}, so it gets MPI"
    return program, "the program does not name MPI and runs without it"


def refuse_warm(engine: "Engine", program: PythonProgram | None) -> Diagnostic | None:
    """Refuse `--warm` where an engine with MPI starts the ranks."""
    if not _has_mpi(engine):
        return None
    message = f"`--warm` forks ranks from one process, and {engine.name} starts each by itself"
    hints = ["leave `--warm` out"]
    if program is not None and program.uses_mpi and program.why:
        hints.append(f"{program.why}, so it gets MPI; `--engine agents` starts it without MPI")
    elif program is not None:
        hints.append("or leave `--engine` out: engine `agents` has it")
    else:
        hints.append(
            "or `--set multihost_config.socket_type=grpc`: engine `agents` then starts the ranks of the recipe"
        )
    return Diagnostic("P070", message, hints=tuple(hints), blame=Blame.COMMAND_LINE)


def warn_of_warm(program: str) -> Diagnostic:
    """Warn that `--warm` has nothing to import once."""
    message = f"`--warm` has no effect: {shown(program)} is no Python program, so each rank starts by itself"
    return Diagnostic("P071", message, severity=Severity.WARNING)


def _has_mpi(engine: "Engine | EngineFinder") -> bool:
    from ttlaunch.engines.base import Capability

    return Capability.MPI in engine.can


def warn_of_early_variable(why: str) -> Diagnostic:
    """Warn that ranks cannot be forks of a process with torch, since the program changes what the import of torch depends on."""
    hint = "set it with `--env NAME=VALUE` instead: the process that imports torch has it, too"
    if "_NUM_THREADS" in why:
        hint = "leave `--warm` out, or have one thread in each rank: a process with several threads is not forked"
    message = f"`--warm` has no effect: {why}; each rank starts by itself"
    return Diagnostic("P075", message, hints=(hint,), severity=Severity.WARNING)
