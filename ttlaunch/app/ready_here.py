"""Check this machine before a run whose ranks all run on it, and control these ranks."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from ttlaunch.app.dialogue import Dialogue, stop_on_errors
from ttlaunch.app.prepare_run import PreparedRun
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.running.preflight import check_listeners, check_machine
from ttlaunch.running.rank_controller import LocalRankController, RankController
from ttlaunch.running.runs.record_inputs import installed_version
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch


class LaunchContext(Protocol):
    """Hosts that are checked and have the code; only the run's folder is not made yet."""

    @property
    def plan(self) -> LaunchPlan:
        """The plan, completed with the networks of the hosts."""

    @property
    def release(self) -> str | None:
        """The hash of the release on all hosts; None if ranks run from the launching machine's own files."""

    def controller(self, folder: RunFolder, watch: Watch, scratch: Path) -> AbstractContextManager[RankController]:
        """Return a context with the controller of the ranks; enter it before the first rank starts."""


def ready_here(prepared: PreparedRun, dialogue: Dialogue) -> LaunchContext:
    """Check that this machine is ready for the ranks of a run.

    Raises:
        LaunchError: This machine is not ready.
    """
    problems = _check_cuda(prepared)
    problems += check_machine(prepared.plan, prepared.engine, python=prepared.surroundings.python)
    stop_on_errors([*problems, *check_listeners()], dialogue)
    return _ReadyHere(prepared.plan)


def _check_cuda(prepared: PreparedRun) -> list[Diagnostic]:
    """Check that ranks on this machine can use the device that their configuration names."""
    choice = prepared.description.choice
    if choice is None or choice.loaded.checked.device_config.device != "cuda":
        return []
    from ttlaunch.agent.probe import gpu_files
    from ttlaunch.hosts.doctor.cuda import Gpus, check_cuda

    is_ours = prepared.surroundings.python == sys.executable  # this process can only look up its own packages
    gpus = Gpus(tuple(gpu_files()), installed_version("torch") if is_ours else None)
    return check_cuda(choice.loaded, dict.fromkeys(prepared.plan.hosts, gpus), topology=prepared.topology)


class _ReadyHere:
    release = None

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan

    @contextmanager
    def controller(self, folder: RunFolder, watch: Watch, scratch: Path) -> Iterator[RankController]:  # noqa: ARG002 - all is here
        daemons = self.plan.engine.names.daemons
        yield LocalRankController(folder.run_id, scratch=scratch, run_folder=folder.path, daemons=daemons)
