"""A rank of a recipe under a bare mpirun, for `benchmarks/supervision_overhead.py`: no shim, no flight recorder of its operations, no records.

    mpirun … python bare_rank.py RUN_FOLDER TIMES_FOLDER

It calls the role's function as `python -m ttlaunch.runtime` does, with the plan of a run that has been. What a rank would
record is dropped, but for the time of each step, which is kept in memory and written at the end. The telemetry of what is sent
stay: they belong to the training.
"""

import json
import os
import sys
import time
from pathlib import Path

from ttlaunch import contract
from ttlaunch.runtime import entry
from ttlaunch.runtime.telemetry import traffic_counter


class Times:
    """In place of the writer of records."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"times-{rank}.json"
        self._times: list[float] = []

    def write(self, kind: str, **_values: object) -> None:
        """Keep when a step was done."""
        if kind == contract.KIND_STEP:
            self._times.append(time.time())
        elif kind == contract.KIND_DONE:
            self._path.write_text(json.dumps(self._times))


class PlainTrafficCounter(traffic_counter.TrafficCounter):
    """The telemetry, without entries in a flight recorder."""

    def __init__(self, path: Path | None = None, *, trace: object = None, recorder: object = None) -> None:  # noqa: ARG002
        super().__init__(path)


def main() -> None:
    """Be the rank that mpirun says."""
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads((run / contract.PLAN_FILE).read_text())
    row = plan["ranks"][int(os.environ["OMPI_COMM_WORLD_RANK"])]
    own = {
        contract.ENV_RUN_ID: contract.BY_HAND,
        contract.ENV_RUN_DIR: str(out),
        contract.ENV_RANK: str(row["rank"]),
        contract.ENV_ROLE: row["role"],
        contract.ENV_PLAN: str(run / contract.PLAN_FILE),
    }
    os.environ.update({**plan["environment"], **row["environment"], **own})
    entry.ProgressWriter = Times  # type: ignore[assignment,misc]
    traffic_counter.TrafficCounter = PlainTrafficCounter  # type: ignore[misc]
    entry.main()


if __name__ == "__main__":
    main()
