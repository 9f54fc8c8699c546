"""Write metrics to event files for TensorBoard: a folder for each run, and a folder in it for each rank."""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ttlaunch.running.metrics.event_log import Event, LoggedRun
from ttlaunch.running.metrics.names import metrics_of


class TensorBoardSink:
    """Writes `PLACE/RUN/rank-N-ROLE/events.out.tfevents.…`."""

    def __init__(self, run: LoggedRun, place: Path) -> None:
        self._run = run
        self._place = place / run.run_id
        self._writers: dict[int, EventFileWriter] = {}
        self._last: dict[int, int] = {}

    def take(self, event: Event) -> None:
        metrics = metrics_of(event)
        if event.rank is None or not metrics:
            return
        step = self._last.get(event.rank, 0) if event.step is None else event.step
        self._last[event.rank] = max(step, self._last.get(event.rank, 0))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        written = TensorBoardEvent(wall_time=event.time, step=step, summary=Summary(value=values))
        self._writer(event.rank).add_event(written)

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self, status: str) -> None:  # noqa: ARG002 - TensorBoard shows no state of a run
        for writer in self._writers.values():
            writer.close()

    def _writer(self, rank: int) -> EventFileWriter:
        if rank not in self._writers:
            self._writers[rank] = EventFileWriter(str(self._place / f"rank-{rank}-{self._run.ranks[rank].role}"))
        return self._writers[rank]
