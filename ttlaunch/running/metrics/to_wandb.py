"""Write metrics to Weights & Biases: each rank has a run with the training guide's name, and these runs form a group.

By default, W&B works offline and sends nothing to its server; `wandb sync FOLDER` uploads later. `WANDB_MODE` changes this.
"""

import os
from pathlib import Path
from typing import Any

import wandb

from ttlaunch.running.metrics.event_log import Event, LoggedRun
from ttlaunch.running.metrics.names import metrics_of, rank_run_name

_PROJECT = "ttlaunch"


class WandbSink:
    """Writes `PLACE/wandb/offline-run-…` for each rank that measures something."""

    def __init__(self, run: LoggedRun, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = run
        self._place = place
        self._runs: dict[int, Any] = {}

    def take(self, event: Event) -> None:
        metrics = metrics_of(event)
        if event.rank is None or not metrics:
            return
        run = self._run_of(event.rank)
        if event.step is None:
            run.summary.update(metrics)
        else:
            run.log({"step": event.step, **metrics})

    def flush(self) -> None:
        """Do nothing: W&B's own process writes continuously."""

    def close(self, status: str) -> None:
        for run in self._runs.values():
            run.summary["status"] = status
            run.finish(exit_code=0 if status == "done" else 1)

    def _run_of(self, rank: int) -> Any:
        """Return the rank's run. Its axis is a value `step`: W&B's own counter cannot go back, but telemetry arrives late."""
        if rank not in self._runs:
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=rank_run_name(self._run, rank),
                group=self._run.run_id,
                job_type=self._run.ranks[rank].role,
                config=dict(self._run.config),
                dir=str(self._place),
                reinit="create_new",
                settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
            )
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            self._runs[rank] = run
        return self._runs[rank]
