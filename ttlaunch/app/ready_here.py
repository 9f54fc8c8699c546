"""Check this machine before a run whose ranks all run on it, and control these ranks."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Protocol

from ttlaunch import contract
from ttlaunch.agent.held_port import hold_port
from ttlaunch.app.dialogue import Dialogue, stop_on_errors
from ttlaunch.app.prepare_run import PreparedRun
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError
from ttlaunch.engines.base import Capability, Engine
from ttlaunch.planning.launch_plan import LaunchPlan, is_python
from ttlaunch.running.preflight import check_listeners, check_machine
from ttlaunch.running.rank_controller import LocalRankController, RankController, engine_variables
from ttlaunch.running.runs.record_inputs import installed_version
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch
from ttlaunch.system_reason import system_reason

if TYPE_CHECKING:
    from ttlaunch.app.coordinator_network import OpenNetwork

_LOOPBACK = "127.0.0.1"


class LaunchContext(Protocol):
    """Hosts that are checked and have the code; only the run's folder is not made yet."""

    @property
    def plan(self) -> LaunchPlan:
        """The plan, completed with the networks of the hosts."""

    @property
    def release(self) -> str | None:
        """The hash of the release on all hosts; None if ranks run from the launching machine's own files."""

    @property
    def marks(self) -> Mapping[str, float]:
        """When each part of the preparation that follows `RunOptions.marks` began."""

    def ask_python(self, arguments: Sequence[str]) -> CompletedProcess[bytes]:
        """Run the interpreter of the ranks to its end, where the first of them runs and with its variables; may take minutes.

        Raises:
            MeasureError: It cannot be run.
        """

    def controller(
        self,
        folder: RunFolder,
        watch: Watch,
        scratch: Path,
        *,
        variables: Mapping[str, str],
        network: "OpenNetwork | None" = None,
    ) -> AbstractContextManager[RankController]:
        """Return a context with the controller of the ranks; enter it before the first rank starts.

        Args:
            folder: The run's folder.
            watch: Follows the records of the ranks.
            scratch: The run's folder in shared memory.
            variables: What shims on every host read from their environment, besides the run's id.
            network: Where the run takes workers of other machines; None: nowhere.
        """


def ready_here(prepared: PreparedRun, dialogue: Dialogue) -> LaunchContext:
    """Check that this machine is ready for the ranks of a run.

    Raises:
        LaunchError: This machine is not ready.
    """
    problems = _check_cuda(prepared)
    problems += check_machine(prepared.plan, prepared.engine, python=prepared.surroundings.python)
    if is_python(prepared.plan):
        try:  # before anything is written; each start of the ranks draws a port of its own
            hold_port().close()
        except OSError as error:
            problems.append(_no_free_port(error))
    if Capability.MPI in prepared.engine.can:
        problems += check_listeners()
    stop_on_errors(problems, dialogue)
    return _ReadyHere(prepared.plan, prepared.engine)


def _check_cuda(prepared: PreparedRun) -> list[Diagnostic]:
    """Check that ranks on this machine can use the device that their configuration names."""
    choice = prepared.description.choice
    if choice is None or choice.loaded.checked.device_config.device != "cuda":
        return []
    from ttlaunch.agent.probe import gpu_files
    from ttlaunch.hosts.doctor.cuda import Gpus, check_cuda, check_one_each

    is_ours = prepared.surroundings.python == sys.executable  # this process can only look up its own packages
    gpus = Gpus(tuple(gpu_files()), installed_version("torch") if is_ours else None)
    hosts = dict.fromkeys(prepared.plan.hosts, gpus)
    found = check_cuda(choice.loaded, hosts, topology=prepared.topology)
    ranks_on = [row.host for row in prepared.plan.ranks]
    return found or check_one_each(choice.loaded, hosts, ranks_on=ranks_on, needs=choice.recipe.needs_processes)


def _no_free_port(error: OSError) -> Diagnostic:
    """Report that this machine has no port on which rank 0 could listen for the others."""
    message = f"this machine has no free port for the store of rank 0: {system_reason(error)}"
    hint = (
        "`ss -ltn` lists who listens; `sysctl net.ipv4.ip_local_port_range` shows the ports that connections may take"
    )
    return Diagnostic("P068", message, hints=(hint,), blame=Blame.HOSTS)


class _ReadyHere:
    release = None

    def __init__(self, plan: LaunchPlan, engine: Engine) -> None:
        self.plan = plan
        self._engine = engine
        self.marks = {"folder": time.time()}

    def ask_python(self, arguments: Sequence[str]) -> CompletedProcess[bytes]:
        from ttlaunch.running.membership.measure import ask_here

        return ask_here(self.plan)(arguments)

    @contextmanager
    def controller(
        self,
        folder: RunFolder,
        watch: Watch,  # noqa: ARG002 - all is here
        scratch: Path,
        *,
        variables: Mapping[str, str],
        network: "OpenNetwork | None" = None,
    ) -> Iterator[RankController]:
        with ExitStack() as held:
            if network is not None:
                variables = {**variables, **held.enter_context(network.meeting_places(self.plan))}
            if is_python(self.plan):
                try:
                    port = held.enter_context(hold_port()).getsockname()[1]
                except OSError as error:
                    raise LaunchError([_no_free_port(error)]) from error
                variables = {**variables, contract.ENV_MASTER_ADDR: _LOOPBACK, contract.ENV_MASTER_PORT: str(port)}
            controller = LocalRankController(
                folder.run_id,
                scratch=scratch,
                run_folder=folder.path,
                daemons=self.plan.engine.names.daemons,
                variables=variables,
            )
            environment = engine_variables(self.plan, folder.run_id, os.environ, controller=controller, scratch=scratch)
            held.enter_context(
                controller.started_ahead(self._engine, self.plan.engine, folder=folder.path, environment=environment)
            )
            yield controller
