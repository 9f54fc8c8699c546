"""Let an elastic run answer questions about its workers and, where the user asked for it, take workers of other machines."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NoReturn

from ttlaunch.planning.launch_plan import RecipeProgram
from ttlaunch.running.membership.service import MeasuredOnce, serving

if TYPE_CHECKING:
    from pathlib import Path

    from ttlaunch.app.coordinator_network import OpenNetwork
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.app.ready_here import LaunchContext
    from ttlaunch.records.coordinator import Fingerprint
    from ttlaunch.running.membership.outside import OutsideWorkers
    from ttlaunch.running.runs.run_folder import RunFolder

_GOODBYE_S = 5.0


def service_of(
    prepared: "PreparedRun",
    ready: "LaunchContext",
    folder: "RunFolder",
    *,
    scratch: "Path",
    network: "OpenNetwork | None",
) -> "Callable[[OutsideWorkers], AbstractContextManager[None]]":
    """Return a function that serves the workers of an elastic run for the time of a context."""
    plan = ready.plan

    @contextmanager
    def serve(workers: "OutsideWorkers") -> Iterator[None]:
        program = plan.program
        assert isinstance(program, RecipeProgram)  # noqa: S101 - no other run is elastic
        assert plan.elastic is not None  # noqa: S101 - likewise
        described = {
            "recipe": program.name,
            "layout": program.layout,
            "role": plan.ranks[0].role,
            "config": prepared.resolved_config,
            "elastic": plan.elastic.as_json(),
        }
        with serving(
            workers,
            described=described,
            fingerprint=_fingerprint(ready, network),
            authority=None if network is None else network.authority,
            folder=folder,
            scratch=scratch,
            network=None if network is None else (network.address, network.listener),
        ):
            try:
                yield
            finally:
                workers.close()
                workers.wait_for_ends(_GOODBYE_S)

    return serve


def _fingerprint(ready: "LaunchContext", network: "OpenNetwork | None") -> "Callable[[], Fingerprint]":
    from ttlaunch.running.membership.measure import MeasureError, measure_fingerprint

    if network is not None:
        return MeasuredOnce(lambda: measure_fingerprint(ready.plan, ready.ask_python))

    def nobody_joins() -> NoReturn:
        raise MeasureError("nobody can join it")

    return nobody_joins
