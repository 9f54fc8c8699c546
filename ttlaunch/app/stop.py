"""End a run from another process, as repeated Ctrl-C in the run's terminal does."""

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, shown

if TYPE_CHECKING:
    from ttlaunch.app.slurm_job import Job
    from ttlaunch.running.runs.launcher import Launcher

_TICK_S = 0.05
_ASK_S = 0.5
_AFTER_SECOND_S = 8.0
"""Seconds to wait after the second interrupt, which leaves the ranks at most 5 s."""
_AFTER_THIRD_S = 15.0


def interrupt(
    launcher: "Launcher", *, grace_s: float | None, now: bool, report: Callable[[str], None] = lambda _: None
) -> bool:
    """Send up to three interrupts, wait after each, and return whether the run has ended.

    Args:
        launcher: The process that supervises the run.
        grace_s: Seconds between the first and the second interrupt; None to wait for as long as the run's own grace period
            lasts.
        now: Whether to send all three interrupts without waiting, so that the ranks do not finish their step.
        report: Called after each interrupt with a short message about it.
    """
    waits = [0.0, 0.0, _AFTER_THIRD_S] if now else [grace_s, _AFTER_SECOND_S, _AFTER_THIRD_S]
    for seconds, message in zip(waits, ("told to end", "told to hurry", "told to end at once"), strict=True):
        if not launcher.signal(signal.SIGINT):
            break
        report(message)
        # Two signals in quick succession could reach the launcher as one, so even a wait of 0 s takes a moment.
        if _has_ended(launcher, seconds, at_least=3 * _TICK_S):
            return True
    return not launcher.is_alive


def stop_job(job: "Job", *, grace_s: float | None, now: bool, report: Callable[[str], None]) -> bool:
    """End a submitted job: while it waits, it leaves the queue; its run saves its step, as after SIGTERM.

    Args:
        job: The job.
        grace_s: Seconds after which Slurm ends the job by force; None to wait for as long as the run's own grace period lasts.
        now: Whether Slurm ends the job at once.
        report: Called with a short message about each order.

    Returns:
        Whether there was something to end.

    Raises:
        LaunchError: Slurm does not take the order.
    """
    from ttlaunch.app.slurm_job import ask_queue, has_ended

    state = ask_queue([job]).of(job)
    if has_ended(state):
        return False
    is_asked = state.runs and not now
    ask_to_end(job) if is_asked else _scancel(job)
    report("told to end" if is_asked else "cancelled")
    deadline = None if grace_s is None or not is_asked else time.monotonic() + grace_s
    while not has_ended(ask_queue([job]).of(job)):
        if deadline is not None and time.monotonic() >= deadline:
            _scancel(job)
            report("cancelled")
            deadline = None
        time.sleep(_ASK_S)
    return True


def ask_to_end(job: "Job") -> None:
    """Have the run of a job save its step and end.

    Raises:
        LaunchError: Slurm does not take the order.
    """
    # `--batch` reaches the supervisor alone; Slurm would send the signal to the ranks as well.
    _scancel(job, "--signal=TERM", "--batch")


def _scancel(job: "Job", *options: str) -> None:
    from ttlaunch.hosts.transport.slurm import ask_slurm

    try:
        answer = ask_slurm("scancel", *options, job.number)
    except FileNotFoundError as error:
        message, hint = "this machine has no `scancel`", "stop the job where Slurm's commands are installed"
        raise LaunchError([Diagnostic("P062", message, hints=(hint,), blame=Blame.HOSTS)]) from error
    if answer.returncode:
        message = f"Slurm does not end job {job.number}: {shown(answer.stderr.strip(), longest=300)}"
        raise LaunchError([Diagnostic("R073", message, hints=(f"`scancel {job.number}` tries it by hand",))])


def _has_ended(launcher: "Launcher", seconds: float | None, *, at_least: float) -> bool:
    """Wait for a launcher to end, for the longer of the two times; None waits without limit: the run has its own grace period."""
    deadline = None if seconds is None else time.monotonic() + max(seconds, at_least)
    while launcher.is_alive:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_TICK_S)
    return True
