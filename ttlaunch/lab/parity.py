"""Run the cells of `ttlaunch parity`, each as its command line would, and compare their bits.

A cell is a run or a simulation; its result comes from its report and the checkpoint of its last step. Results can be kept
in a file, so that a long matrix can continue after an interruption.
"""

import contextlib
import hashlib
import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.library import start
from ttlaunch.app.report import Report
from ttlaunch.app.run_handle import Run
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import LaunchError, Severity
from ttlaunch.lab.simulate import Simulation, plan_simulation, run_simulation
from ttlaunch.planning.parity import Cell
from ttlaunch.running.checkpoints.tensor_difference import largest_difference, read_weights
from ttlaunch.running.checkpoints.tensor_file import FiledTensor
from ttlaunch.spec.recipe.discovery import list_recipes

_LONGEST_S = 3600.0
_LONGEST_ERROR = 2000


@dataclass(frozen=True)
class Result:
    """The result of a cell.

    Attributes:
        sha256: The hash of all parameters; None if the cell failed.
        difference: The largest difference of a parameter from the reference; None if it is not known.
        memory_bytes: The peak memory of the largest process.
        seconds: The time from the start of the cell to its end.
        sent_bytes: The bytes that all ranks sent together; None if they kept no telemetry.
        formula_bytes: The same number by the recipe's formula; None if the two were not compared.
        error: Why the cell failed; None if it did not.
        was_kept: Whether the result is from the file of an earlier call.
    """

    cell: Cell
    command: str
    sha256: str | None
    difference: float | None
    memory_bytes: int | None
    seconds: float
    sent_bytes: int | None = None
    formula_bytes: int | None = None
    error: str | None = None
    was_kept: bool = False

    def as_json(self) -> dict[str, Any]:
        difference = str(self.difference) if self.difference == math.inf else self.difference  # JSON has no infinity
        return {**asdict(self), "difference": difference}


class Parity:
    """Runs the cells of a matrix.

    Args:
        steps: The number of steps of each training.
        simulated: Whether all ranks of a cell are in one process, instead of real ranks under mpirun.
        jobs: How many cells run at the same time.
        scratch: An empty folder for the runs.
        kept: The file of results. Results of the same code in it are reused, and new ones are added.

    Raises:
        OSError: The file of results cannot be read or written.
    """

    def __init__(self, *, steps: int, simulated: bool, jobs: int, scratch: Path, kept: Path | None) -> None:
        self._steps = steps
        self._simulated = simulated
        self._jobs = jobs
        self._scratch = scratch
        self._kept = kept
        self._code = code_hash() if kept else ""
        self._known = self._read_kept()
        self._references: dict[str, tuple[str, Mapping[str, FiledTensor]]] = {}
        self._running: set[Run] = set()
        self._ends = threading.Event()

    def results(self, cells: Sequence[Cell]) -> Iterator[Result]:
        """Run the cells and yield their results in order; the first cell of each precision runs before all others.

        Raises:
            OSError: The file of results can no longer be written.
        """
        known = self._known
        firsts = list({cell.precision: cell for cell in reversed(cells)}.values())
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                # Every other cell is compared with the reference of its precision, which therefore has to be complete first.
                references = {cell: pool.submit(self._reference, cell) for cell in firsts}
                for future in references.values():
                    future.result()
                futures = {
                    cell: pool.submit(self._run, cell) for cell in cells if cell not in references and cell not in known
                }
                for cell in cells:
                    result = known[cell] if cell in known and cell not in references else None
                    result = result or (references | futures)[cell].result()
                    self._keep(result)
                    yield result
            finally:
                self._ends.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for run in list(self._running):  # as Ctrl-C would
                    run.stop()

    def _reference(self, cell: Cell) -> Result:
        folder = self._scratch / f"reference-{cell.precision}"
        result = self._run_cell(cell, folder)
        if result.sha256 is not None:
            self._references[cell.precision] = result.sha256, _last_weights(folder)
        return replace(result, difference=0.0 if result.sha256 else None)

    def _run(self, cell: Cell) -> Result:
        folder = self._scratch / hashlib.sha256(str(cell).encode()).hexdigest()[:16]
        result = self._run_cell(cell, folder)
        reference = self._references.get(cell.precision)
        try:
            if result.sha256 is None or reference is None:
                return result
            same = result.sha256 == reference[0]
            return replace(result, difference=0.0 if same else largest_difference(reference[1], _last_weights(folder)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_cell(self, cell: Cell, folder: Path) -> Result:
        """Run one cell, as its command line would."""
        command = cell.command(steps=self._steps, simulated=self._simulated)
        if self._ends.is_set():
            return _failed(cell, command, "it was not started")
        began = time.monotonic()
        try:
            answer = self._simulate(cell, folder) if self._simulated else self._start(cell, folder)
            answer.raise_for_failure()
        except (LaunchError, TimeoutError) as error:
            return _failed(cell, command, error_text(error), seconds=time.monotonic() - began)
        seconds, digest, report = time.monotonic() - began, answer.parameters_sha256, answer.as_json()
        if digest is None:
            return _failed(cell, command, "no rank has reported its parameters", seconds=seconds)
        sent, formula = _traffic(report)
        return Result(cell, command, digest, None, _peak(report), seconds, sent, formula)

    def _simulate(self, cell: Cell, folder: Path) -> Simulation:
        overrides = tuple(cell.overrides(steps=self._steps))
        spec = RunSpec(target=cell.recipe, overrides=overrides, ranks=cell.world_size)
        return run_simulation(plan_simulation(spec, Unattended()), keep=folder, cancelled=self._ends)

    def _start(self, cell: Cell, folder: Path) -> Report:
        run = start(cell.recipe, set=cell.overrides(steps=self._steps), ranks=cell.world_size, runs_dir=folder)
        self._running.add(run)
        try:
            return run.wait(timeout=_LONGEST_S)
        except TimeoutError:
            run.stop(now=True)
            raise
        finally:
            self._running.discard(run)

    def _read_kept(self) -> dict[Cell, Result]:
        if self._kept is None:
            return {}
        with self._kept.open(
            "a+", encoding="utf-8", errors="replace"
        ) as file:  # "a+" fails now, not later, if the file cannot be written
            file.seek(0)
            lines = file.read().splitlines()
        found = {}
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that was cut off is skipped
                entry = json.loads(line)
                if (entry.pop("code"), entry.pop("steps")) != (self._code, self._steps):
                    continue
                cell, difference = Cell(**entry.pop("cell")), entry.pop("difference")
                found[cell] = Result(
                    cell, **{**entry, "difference": difference and float(difference), "was_kept": True}
                )
        return {cell: result for cell, result in found.items() if self._is_of_this_kind(result)}

    def _is_of_this_kind(self, result: Result) -> bool:
        return result.sha256 is not None and result.command == result.cell.command(
            steps=self._steps, simulated=self._simulated
        )

    def _keep(self, result: Result) -> None:
        if self._kept is not None and not result.was_kept:
            entry = {**result.as_json(), "code": self._code, "steps": self._steps}
            try:
                with self._kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:  # an error for a full disk has no file name
                raise OSError(error.errno, error.strerror, str(self._kept)) from error


def _failed(cell: Cell, command: str, error: str, *, seconds: float = 0.0) -> Result:
    return Result(cell, command, sha256=None, difference=None, memory_bytes=None, seconds=seconds, error=error)


def error_text(error: LaunchError | TimeoutError) -> str:
    """Describe in one line why a run has no result."""
    if isinstance(error, TimeoutError):
        return str(error)
    errors = [one for one in error.diagnostics if one.severity is Severity.ERROR] or error.diagnostics
    return errors[0].message[:_LONGEST_ERROR] if errors else f"it ended with status {error.exit_status}"


def code_hash() -> str:
    """Hash everything that computes: the package, all recipes and torch's version. Results of other code are not reused."""
    return hash_folders([Path(contract.__file__).parent, *(found.folder for found in list_recipes(Path.cwd()))])


def hash_folders(folders: Iterable[Path]) -> str:
    """Hash the Python files of some folders together with the versions of Python and torch."""
    digest = hashlib.sha256(sys.version.encode())
    with contextlib.suppress(PackageNotFoundError):
        digest.update(version("torch").encode())
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _last_weights(folder: Path) -> Mapping[str, FiledTensor]:
    """Read the weights of the one checkpoint below the folder of a run or a simulation."""
    checkpoints = [path for path in folder.rglob("step-*") if (path / contract.CHECKPOINT_MANIFEST).is_file()]
    return read_weights(checkpoints[0]) if checkpoints else {}


def _peak(report: Mapping[str, Any]) -> int | None:
    peaks = [rank.get("peak_memory_bytes") for rank in report.get("ranks", ())]
    found = [peak for peak in (*peaks, report.get("peak_memory_bytes")) if peak]
    return max(found) if found else None


def _traffic(report: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the bytes that all ranks have sent, and those of the recipe's formula."""
    traffic = report.get("traffic")
    if traffic is None:
        return None, None
    sent = sum(edge["bytes"] for edge in traffic["edges"])
    compared = traffic["not_compared"] is None
    return sent, sum(edge["formula_bytes"] for edge in traffic["edges"]) if compared else None
