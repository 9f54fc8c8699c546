"""The result of a run as Python sees it: `ttlaunch.Report`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ttlaunch.app.outcome import Outcome
from ttlaunch.app.run_diagnostics import run_diagnostics
from ttlaunch.diagnostics import Diagnostic, LaunchError, Severity, render
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.speed import render_speed

DONE = "done"


@dataclass(frozen=True)
class Report:
    """The result of a run that has ended, completely or not.

    Attributes:
        name: The name of the recipe or program.
        layout: The layout of the recipe's roles; None for a program that is no recipe.
        status: "done", "failed", "hung", "interrupted", "terminated" or "time limit".
        exit_status: The exit status that the command line would have: 0 done, 1 a rank failed, 6 hung, 7 a host was lost, and
            so on.
        duration_s: The time from mpirun's start to its end.
        steps: The last optimizer step that was done; 0 for a program.
        parameters_sha256: The hash over all parameters in name order; None if no rank reported them.
        parameters_agree: Whether all ranks that hold a parameter hold the same bits.
        first_validation, last_validation: Mean loss per token, or per image, in nats; None if none was measured.
        tokens_per_s: The throughput of the fastest rank that counts tokens; None if no rank does.
        samples_per_s: The throughput of the fastest rank that counts samples, such as images; None if no rank does.
        results: The values that the recipe added to the summary, by name.
        diagnostics: The diagnostics of the run; after a failure, its cause comes first.
        earlier: The reports of the starts before this one, oldest first; empty without restarts.
        details: The whole report, as `ttlaunch run --format json` prints it.
    """

    run_id: str
    folder: Path
    name: str
    layout: str | None
    status: str
    exit_status: int
    world_size: int
    duration_s: float
    steps: int
    parameters_sha256: str | None
    parameters_agree: bool
    first_validation: float | None
    last_validation: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    results: Mapping[str, Any]
    diagnostics: tuple[Diagnostic, ...]
    earlier: "tuple[Report, ...]"
    details: Mapping[str, Any]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], *, more: Sequence[Diagnostic] = (), status: int | None = None) -> Self:
        """Make the report of a run from all its starts; the last one counts.

        Args:
            outcomes: The outcomes of all starts, oldest first.
            more: Further diagnostics of the last start.
            status: The exit status, if it is not that of the last start.
        """
        last, before = outcomes[-1], outcomes[:-1]
        found = (*run_diagnostics(last.report, last.facts, last.folder), *more)
        exit_status = last.report.exit_status if status is None else status
        started_before = [{"run_id": one.folder.run_id, "failure": one.report.as_json()["failure"]} for one in before]
        details = {
            **last.report.as_json(),
            "exit_status": exit_status,
            "earlier": started_before,
            "diagnostics": [diagnostic.as_json() for diagnostic in found],
        }
        report = last.report
        return cls(
            run_id=last.folder.run_id,
            folder=last.folder.path,
            name=report.name,
            layout=report.layout,
            status=report.status,
            exit_status=exit_status,
            world_size=report.world_size,
            duration_s=report.duration_s,
            steps=report.steps,
            parameters_sha256=report.parameters_sha256,
            parameters_agree=report.parameters_agree,
            first_validation=report.first_validation,
            last_validation=report.last_validation,
            tokens_per_s=report.tokens_per_s,
            samples_per_s=report.samples_per_s,
            results=report.results,
            diagnostics=found,
            earlier=tuple(cls.of([one]) for one in before),
            details=details,
        )

    @property
    def failure(self) -> Diagnostic | None:
        """Why the run did not complete; None if it did, or if it was stopped."""
        errors = (one for one in self.diagnostics if one.severity is Severity.ERROR)
        return next(errors, None) if self.status != DONE else None

    def raise_for_failure(self) -> None:
        """Raise the diagnostics as an error unless the run completed.

        Raises:
            LaunchError: The run did not complete; the error has the report's diagnostics and exit status.
        """
        if self.status != DONE:
            raise LaunchError(self.diagnostics, status=self.exit_status)

    def as_json(self) -> Mapping[str, Any]:
        """Return what `ttlaunch run --format json` prints."""
        return self.details

    def _repr_html_(self) -> str:
        """Show the results and the diagnostics in a notebook."""
        from ttlaunch.diagnostics.html import facts_html, text_html  # only notebooks need it

        facts = {
            "run": self.run_id,
            "status": self.status,
            "recipe": f"{self.name} ({self.layout})" if self.layout else self.name,
            "ranks": self.world_size,
            "steps": self.steps or None,
            "validation loss": self.last_validation,
            "speed": render_speed(self) or None,
            "seconds": f"{self.duration_s:.1f}",
            "parameters": self.parameters_sha256,
            **self.results,
        }
        return facts_html(facts) + (text_html(render(self.diagnostics)) if self.diagnostics else "")
