"""Write metrics to MLflow: a recipe becomes an experiment, a run becomes a run in it, and each rank a nested run."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from ttlaunch.running.metrics.event_log import Event, LoggedRun
from ttlaunch.running.metrics.names import metrics_of, rank_run_name

_MOST_AT_ONCE = 1000
_MOST_PARAMS = 100
_LONGEST_PARAM = 500


class MlflowSink:
    """Writes into a folder, or to a tracking server if the place is an address such as `http://host:5000`."""

    def __init__(self, run: LoggedRun, place: str) -> None:
        is_folder = "://" not in place
        if is_folder:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer MLflow writes to a folder only with this
            Path(place).mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=Path(place).as_uri() if is_folder else place)
        self._run = run
        self._experiment = self._find_experiment(run.recipe)
        self._parent = self._begin(run.run_id, {"plan_hash": run.plan_hash, "layout": str(run.layout)})
        params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in _flat(run.config)]
        for at in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._parent, params=params[at : at + _MOST_PARAMS])
        self._ranks: dict[int, str] = {}
        self._waiting: dict[int, list[Metric]] = {}

    def take(self, event: Event) -> None:
        metrics = metrics_of(event)
        if event.rank is None or not metrics:
            return
        waiting = self._waiting.setdefault(event.rank, [])
        when = int(event.time * 1000)
        waiting += [Metric(_key(name), value, when, event.step or 0) for name, value in metrics.items()]
        if len(waiting) >= _MOST_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        for rank, metrics in self._waiting.items():
            for at in range(0, len(metrics), _MOST_AT_ONCE):
                self._client.log_batch(self._of_rank(rank), metrics=metrics[at : at + _MOST_AT_ONCE])
        self._waiting.clear()

    def close(self, status: str) -> None:
        self.flush()
        is_stopped = status in {"interrupted", "terminated", "time limit"}
        ended = "FINISHED" if status == "done" else "KILLED" if is_stopped else "FAILED"
        for run in (*self._ranks.values(), self._parent):
            self._client.set_terminated(run, status=ended)

    def _find_experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))

    def _begin(self, name: str, tags: Mapping[str, str]) -> str:
        run = self._client.create_run(self._experiment, run_name=name)
        self._client.log_batch(run.info.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        return str(run.info.run_id)

    def _of_rank(self, rank: int) -> str:
        if rank not in self._ranks:
            row = self._run.ranks[rank]
            tags = {"mlflow.parentRunId": self._parent, "rank": str(rank), "role": row.role, "host": row.host}
            self._ranks[rank] = self._begin(rank_run_name(self._run, rank), tags)
        return self._ranks[rank]


def _key(name: str) -> str:
    """Replace the characters that MLflow does not allow in names."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
