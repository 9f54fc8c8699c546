"""A run in a notebook: a small view that goes on as long as the run does, read from the ends of the run's files."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any, Final

from ttlaunch import contract
from ttlaunch.diagnostics.html import facts_html, table_html, text_html
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.running.metrics.event_log import EventLog, read_logged_run
from ttlaunch.running.metrics.log_place import place_near_end
from ttlaunch.running.report import read_report
from ttlaunch.running.runs.overview import summarise

EVERY_S: Final = 1.0
"""How often a view in a notebook is drawn anew."""
_STEPS = 400
_MOST_ROWS = 16
_WIDTH, _HEIGHT = 360, 60


class NotebookView:
    """The view of one run; each call of `bundle` reads what is new."""

    def __init__(self, folder: Path) -> None:
        """Begin with the run's last steps.

        Raises:
            OSError, ValueError: The run's plan cannot be read.
        """
        self.folder = folder
        place = place_near_end(folder, read_logged_run(folder).ranks, most=_STEPS)
        self._log = EventLog(folder, place=place)
        self._losses: deque[tuple[int, float]] = deque(maxlen=_STEPS)

    def bundle(self) -> dict[str, str]:
        """Return the view as text and as HTML, by MIME type; neither has a script or loads anything."""
        for event in self._log.unordered():
            loss = event.values.get("loss") if event.kind == contract.KIND_STEP else None
            if isinstance(loss, float | int) and (not self._losses or (event.step or 0) > self._losses[-1][0]):
                self._losses.append((event.step or 0, float(loss)))
        (run,) = summarise([self.folder])
        step = f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)
        known = {"run": run.folder.name, "recipe": run.name, "state": run.state, "step": step, "loss": run.loss}
        failure = self._failure()
        rows = [
            (state.row.rank, state.row.role, state.row.host, state.condition(reports_ready=True), state.step)
            for state in self._log.states[:_MOST_ROWS]
        ]
        ranks = table_html(("rank", "role", "host", "state", "step"), rows) if not run.is_over else ""
        text = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        html = facts_html(known) + _curve_html(list(self._losses)) + ranks + (text_html(failure) if failure else "")
        return {"text/plain": "\n".join(filter(None, (clean(text), failure))), "text/html": html}

    def _failure(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            failure = read_report(self.folder).failure
            return clean(f"error[{failure.code}]: {failure.message}") if failure else ""
        return ""


def show_while(view: NotebookView, goes_on: Callable[[], bool], display: Callable[..., Any]) -> threading.Thread | None:
    """Display a view, and draw it anew in a thread until its run has ended.

    Args:
        view: The view.
        goes_on: Whether the run is still running.
        display: `IPython.display.display`.

    Returns:
        The thread; None if the run has ended already.
    """
    is_running = goes_on()  # asked first, so that what is drawn last is the end
    handle = display(view.bundle(), raw=True, display_id=True)
    if not is_running or handle is None:
        return None

    def follow() -> None:
        shown: Mapping[str, str] = {}
        with contextlib.suppress(OSError, ValueError):  # the folder is gone: the view stays as it is
            while True:
                is_running = goes_on()
                bundle = view.bundle()
                if bundle != shown:
                    handle.update(bundle, raw=True)
                    shown = bundle
                if not is_running:
                    return
                time.sleep(EVERY_S)

    thread = threading.Thread(target=follow, daemon=True, name=f"ttlaunch-view-{view.folder.name}")
    thread.start()
    return thread


def _curve_html(points: list[tuple[int, float]]) -> str:
    """Draw the losses as a line in the colour of the text."""
    known = [(step, loss) for step, loss in points if abs(loss) < float("inf")]
    if len(known) < 2:  # noqa: PLR2004 - a line has two ends
        return ""
    first, last = known[0][0], known[-1][0]
    least, most = min(loss for _, loss in known), max(loss for _, loss in known)
    path = " ".join(
        f"{(step - first) / max(1, last - first) * _WIDTH:.1f},"
        f"{(1 - (loss - least) / ((most - least) or 1)) * (_HEIGHT - 4) + 2:.1f}"
        for step, loss in known
    )
    label = escape(f"loss from {known[0][1]:.4g} in step {first} to {known[-1][1]:.4g} in step {last}")
    line = f"<polyline points='{path}' fill='none' stroke='currentColor' stroke-width='1.5'/>"
    return (
        f"<svg role='img' aria-label='{label}' width='{_WIDTH}' height='{_HEIGHT}'><title>{label}</title>{line}</svg>"
    )
