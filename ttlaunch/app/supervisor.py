"""Start the process that carries a run out, and wait until it has begun one."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.cli.last_resort import status_of
from ttlaunch.cli.session import Line, Session, leave_terminal, start_session
from ttlaunch.cli.signals import handled

if TYPE_CHECKING:
    from ttlaunch.app.outcome import Outcome
    from ttlaunch.running.runs.run_folder import RunFolder

_TICK_S = 0.1

Begun = Callable[["RunFolder"], None]
"""Is told of a run's folder before anything of the run starts."""


def start_supervisor(
    work: Callable[[Begun], "list[Outcome]"], *, exit_status: Callable[["list[Outcome]"], int]
) -> Session:
    """Carry plans out in a process of its own.

    Args:
        work: Does it.
        exit_status: That of the process, from what came out.
    """

    def supervise(line: Line) -> int:
        def begun(folder: "RunFolder") -> None:
            from ttlaunch.running.runs.run_folder import supervisor_file

            leave_terminal({name: str(folder.file(supervisor_file(name))) for name in ("stdout", "stderr")})
            line.tell(run=str(folder.path))

        outcomes = work(begun)
        if not outcomes[-1].folder.file(contract.REPORT_FILE).is_file():  # its disk is full
            line.tell(report=outcomes[-1].report.as_json())
        return exit_status(outcomes)

    return start_session(lambda line: status_of(lambda: supervise(line)))


def wait_for_run(session: Session) -> Path | None:
    """The folder of the run that a supervisor has begun; None if it ended before it came to that.

    Until then nothing has started, and every signal ends it.
    """

    def end(number: int) -> None:
        session.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), end)):
        while not (begun := [record["run"] for record in session.said if "run" in record]) and not session.is_over:
            session.wait(_TICK_S)
    return Path(begun[0]) if begun else None
