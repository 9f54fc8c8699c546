"""Run the recipes of a comparison one after the other, each as its command line would, and reuse earlier runs.

Completed runs are kept. If the user starts the same comparison again, after Ctrl-C or with more repeats, it uses the
existing runs that have the same plan hash and were made by the same code.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.library import plan, start
from ttlaunch.diagnostics import Diagnostic, LaunchError
from ttlaunch.lab.comparison.measure import CODE_FILE, Measured, measure_run, read_code
from ttlaunch.lab.parity import error_text, hash_folders
from ttlaunch.planning.comparison import Candidate, Workload
from ttlaunch.running.runs.facts import run_folders
from ttlaunch.running.runs.files import read_object_if_any
from ttlaunch.spec.recipe.discovery import find_recipe

_LONGEST_S = 3600.0
_LONGEST_ERROR = 500


@dataclass(frozen=True)
class Attempt:
    """One run of a candidate.

    Attributes:
        repeat: The number of the repetition, from 1.
        measured: The numbers of the run; None if it failed.
        error: Why the run failed; None if it did not.
        command: The command that starts the same run.
        was_kept: Whether the run is one of an earlier comparison.
    """

    candidate: Candidate
    repeat: int
    measured: Measured | None
    error: str | None
    command: str
    was_kept: bool = False


class Comparison:
    """Runs of some candidates on one workload.

    Args:
        workload: The training that all candidates do.
        on: The cluster, as `--on` names it.
        folder: The folder that keeps the runs.
        repeats: How often each candidate runs.
    """

    def __init__(self, workload: Workload, *, on: str, folder: Path, repeats: int) -> None:
        self._workload = workload
        self._on = on
        self._runs = folder / "runs"
        self._repeats = repeats
        self._broken: set[Candidate] = set()

    def attempts(self, candidates: Sequence[Candidate]) -> Iterator[Attempt]:
        """Run all candidates once, then all a second time and so on, so that load on the machine affects all alike.

        A candidate that has failed once does not run again.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C; the active run has been ended.
        """
        kept = self._kept()
        known: dict[Candidate, tuple[str, str]] = {}
        for repeat in range(1, self._repeats + 1):
            for candidate in candidates:
                if candidate in self._broken:
                    continue
                if candidate not in known:
                    known[candidate] = self._plan_hash(candidate), code_of(candidate.recipe)
                runs = kept.get(known[candidate], [])
                attempt = self._reuse(candidate, repeat, runs.pop(0)) if runs else self._run(candidate, repeat)
                if attempt.measured is None:
                    self._broken.add(candidate)
                yield attempt

    def command(self, candidate: Candidate) -> list[str]:
        """Return the command line of a run."""
        return ["ttlaunch", "run", *candidate.arguments(self._workload, on=self._on)]

    def _kept(self) -> dict[tuple[str, str], list[Path]]:
        """Find completed runs by the hashes of their plan and of the code that made them, oldest first."""
        found: dict[tuple[str, str], list[Path]] = {}
        for path in run_folders(self._runs):
            report = read_object_if_any(path / contract.REPORT_FILE)
            if report.get("status") == "done":
                found.setdefault((str(report.get("plan_hash")), read_code(path)), []).append(path)
        return found

    def _plan_hash(self, candidate: Candidate) -> str:
        """Return the hash of the candidate's plan; empty if planning fails, which the run will report."""
        try:
            return plan(candidate.recipe, on=self._on, set=candidate.settings(self._workload)).hash
        except LaunchError:
            return ""

    def _reuse(self, candidate: Candidate, repeat: int, path: Path) -> Attempt:
        return Attempt(candidate, repeat, measure_run(path), None, shlex.join(self.command(candidate)), was_kept=True)

    def _run(self, candidate: Candidate, repeat: int) -> Attempt:
        """Start one run. Ctrl-C ends it without grace, because an incomplete run cannot be compared."""
        command, settings = shlex.join(self.command(candidate)), candidate.settings(self._workload)
        try:
            with start(candidate.recipe, on=self._on, set=settings, grace=0.0, runs_dir=self._runs) as run:
                report = run.wait(timeout=_LONGEST_S)
            report.raise_for_failure()
        except (LaunchError, TimeoutError) as error:
            return Attempt(candidate, repeat, None, error_text(error)[:_LONGEST_ERROR], command)
        path = report.folder
        try:
            (path / CODE_FILE).write_text(json.dumps({"code": code_of(candidate.recipe)}) + "\n", encoding="utf-8")
            return Attempt(candidate, repeat, measure_run(path), None, command)
        except (OSError, ValueError, KeyError) as error:
            reason = f"what it measured cannot be compared: {type(error).__name__}: {error}"
            return Attempt(candidate, repeat, None, reason[:_LONGEST_ERROR], command)


def code_of(recipe: str) -> str:
    """Hash the code that a run executes in its ranks: the recipe, the package's runtime, and the versions of Python and torch.

    The launcher's code is left out, because it changes none of the numbers that are compared.
    """
    found = find_recipe(recipe, working_folder=Path.cwd())
    package = Path(contract.__file__).parent
    own = [] if isinstance(found, Diagnostic) else [found.folder]
    return hash_folders([package / "runtime", package / "spec" / "recipe", *own])
