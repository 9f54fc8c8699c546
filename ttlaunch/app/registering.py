"""Record the start and the end of a run in the user's registry; warn once if the registry cannot be used."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.diagnostics import Diagnostic, Severity
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.running.runs.registry import RegistryError, find_registry
from ttlaunch.running.runs.run_folder import RunFolder

_STILL = "the run continues; in the folder where it was started, `ttlaunch ps` still finds it"


@contextmanager
def registered(plan: LaunchPlan, folder: RunFolder, dialogue: Dialogue) -> Iterator[None]:
    """Record a run when it starts, and its end after its report was written."""
    try:
        registry = find_registry(os.environ)
        registry.enter(folder.path, name=plan.program.name, plan_hash=plan.hash, ranks=plan.world_size)
    except RegistryError as error:
        dialogue.warn([registry_diagnostic(error, note=_STILL)])
        yield
        return
    yield
    try:
        registry.leave(folder.path)
    except RegistryError as error:
        dialogue.warn([registry_diagnostic(error, note="how it ended stands in its own folder")])


def registry_diagnostic(error: RegistryError, *, note: str) -> Diagnostic:
    """Warn that the registry cannot be used."""
    return Diagnostic("R047", f"the registry of runs cannot be used: {error}", severity=Severity.WARNING, notes=(note,))
