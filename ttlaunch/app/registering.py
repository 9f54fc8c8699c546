"""Record the start and the end of a run in the user's registry; warn once if the registry cannot be used."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING

from ttlaunch.app.dialogue import Dialogue
from ttlaunch.diagnostics import Diagnostic, Severity
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.running.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from ttlaunch.running.runs.registry import RegistryError

_STILL = "the run continues; in the folder where it was started, `ttlaunch ps` still finds it"


@contextmanager
def registered(plan: LaunchPlan, folder: RunFolder, dialogue: Dialogue) -> Iterator[Callable[[], None]]:
    """Record a run when it starts, and its end after its report was written.

    A thread records the start, because the registry waits for the disk several times. The returned function waits until it has
    done so, and warns if it could not; call it before the first rank starts.
    """
    entering = _Entering(plan, folder)
    entering.start()

    def wait() -> None:
        entering.join()
        problem, entering.problem = entering.problem, None
        if problem is not None:
            dialogue.warn([registry_diagnostic(problem, note=_STILL)])

    yield wait
    wait()
    if not entering.is_entered:
        return
    from ttlaunch.running.runs.registry import RegistryError, find_registry

    try:
        find_registry(os.environ).leave(folder.path)
    except RegistryError as error:
        dialogue.warn([registry_diagnostic(error, note="how it ended stands in its own folder")])


class _Entering(Thread):
    """Adds a run to the user's registry."""

    def __init__(self, plan: LaunchPlan, folder: RunFolder) -> None:
        super().__init__(daemon=True)
        self.problem: RegistryError | None = None
        self.is_entered = False
        self._plan, self._folder = plan, folder

    def run(self) -> None:
        from ttlaunch.running.runs.registry import RegistryError, find_registry

        plan = self._plan
        try:
            registry = find_registry(os.environ)
            registry.enter(self._folder.path, name=plan.program.name, plan_hash=plan.hash, ranks=plan.world_size)
        except RegistryError as error:
            self.problem = error
        else:
            self.is_entered = True


def registry_diagnostic(error: "RegistryError", *, note: str) -> Diagnostic:
    """Warn that the registry cannot be used."""
    return Diagnostic("R047", f"the registry of runs cannot be used: {error}", severity=Severity.WARNING, notes=(note,))
