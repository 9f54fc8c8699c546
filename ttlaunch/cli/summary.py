"""The end of a run in a few lines, and its failure as a diagnostic that names who broke first."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ttlaunch import contract
from ttlaunch.app.resolve import short_name
from ttlaunch.cli.checkpoint_view import lost_steps
from ttlaunch.cli.ending_view import render_stop
from ttlaunch.diagnostics import Diagnostic, Label, Source
from ttlaunch.diagnostics.count import counted
from ttlaunch.profiling import profile_file
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import render_cascade
from ttlaunch.running.report import Report
from ttlaunch.running.runs.recorded import RunFacts
from ttlaunch.running.runs.run_folder import RunFolder

_OF_RELEASE = re.compile(f".*/{contract.RELEASES_DIR}/[0-9a-f]{{64}}/{contract.PROJECT_DIR}/(?P<path>.+)")
"""A file of this folder as it lies on another host."""


def show_summary(
    report: Report, facts: RunFacts, folder: RunFolder, *, stream: TextIO, timeline: Path | None = None
) -> None:
    """What came out."""
    layout = f" ({report.layout})" if report.layout else ""
    lines = [
        f"{report.status}: {report.name}{layout} on {facts.topology}, {counted(report.world_size, 'rank')}, {report.duration_s:.1f} s"
    ]
    lines += [*_steps(report), *render_stop(report)]
    if report.first_validation is not None and report.last_validation is not None:
        first, last = report.first_validation, report.last_validation
        change = f" ({(last / first - 1) * 100:+.0f} %)" if first and math.isfinite(last / first) else ""
        only = first == last
        lines.append(
            f"  validation loss  {last:.4f}"
            if only
            else f"  validation loss  {first:.4f} first, {last:.4f} last{change}"
        )
    if report.last_perplexity is not None:
        lines.append(f"  perplexity       {report.last_perplexity:,.4g}")
    if report.tokens_per_s:
        lines.append(f"  speed            {report.tokens_per_s:,.0f} tokens/s")
    width = max(16, *(len(name) for name in report.results)) if report.results else 0
    lines += [f"  {name:{width}} {_plain(value)}" for name, value in report.results.items()]
    if report.parameters_sha256:
        agree = "" if report.parameters_agree else " (ranks DISAGREE)"
        lines.append(f"  parameters       sha256 {report.parameters_sha256}{agree}")
    if report.lost_checkpoints:
        lines.append(f"  no checkpoint of {lost_steps(report)}")
    if report.leftovers:
        lines.append(
            f"  left behind      {report.leftovers} {'process' if report.leftovers == 1 else 'processes'}, killed"
        )
    if timeline is not None:
        lines.append(f"  timeline         {short_name(timeline, Path.cwd())}, for https://ui.perfetto.dev")
    profiles = [rank["rank"] for rank in report.ranks if folder.file(profile_file(rank["rank"])).is_file()]
    if profiles:
        place = short_name(folder.file(profile_file(profiles[0])), Path.cwd())
        more = f" and {len(profiles) - 1} more" if profiles[1:] else ""
        lines.append(f"  torch's profile  {place}{more}, for https://ui.perfetto.dev")
    lines.append(f"  run folder       {short_name(folder.path, Path.cwd())}")
    stream.write("\n".join(lines) + "\n")
    stream.flush()


def _steps(report: Report) -> list[str]:
    """From where to where training went."""
    lines = [f"  steps            {report.steps}"] if report.steps else []
    if report.began_from:
        lines.append(f"  began from       {short_name(Path(report.began_from['origin']), Path.cwd())}")
        if report.status == "done" and not report.steps:
            lines.append(f"  steps            none: nothing is left to train after step {report.began_from['step']}")
    return lines


def failure_diagnostic(report: Report, folder: RunFolder) -> Diagnostic | None:
    """Who broke first, how, at which line, its last words, what followed and what to do next; None if nobody did."""
    failure = report.failure
    if failure is None:
        return None
    is_hung = failure.kind is Cause.HUNG
    label = _source_label(failure.place, ("it is here",) if is_hung else failure.evidence)
    notes = [] if label else [*filter(None, [failure.place])]
    notes += failure.evidence[1:] if label and not is_hung else failure.evidence
    hints = [failure.next_step] if failure.next_step else []
    if is_hung and failure.rank is None and folder.file(contract.STACKS_DIR).is_dir():
        hints.append(_stacks_hint(folder))
    if failure.rank is not None:
        last = report.ranks[failure.rank].get("last_operation")
        notes += [f"its last operation: {last['text']}"] if last and not is_hung else []
        says_all = failure.place or failure.kind is Cause.CHECKPOINT  # their last words are this message
        notes += [] if says_all else _last_words(failure.last_lines)
        cascade = render_cascade(failure.followers)
        notes += [f"the first rank to fail; {cascade}"] if cascade else []
        hints += [_stacks_hint(folder)] if is_hung else []
        hints.append(f"full log: {short_name(folder.path, Path.cwd())}/{contract.stderr_file(failure.rank)}")
    return Diagnostic(failure.code, failure.message, label, notes=tuple(notes), hints=tuple(hints))


def _stacks_hint(folder: RunFolder) -> str:
    return f"what every rank was doing: {short_name(folder.path, Path.cwd())}/{contract.STACKS_DIR}/"


def _source_label(place: str | None, evidence: Sequence[str]) -> Label | None:
    """The line that raised, if its file can be read here, or is a copy of one that can."""
    if place is None:
        return None
    name, _, number = place.rpartition(":")
    copied = _OF_RELEASE.fullmatch(name)
    if copied and not Path(name).exists():
        name = str(Path.cwd() / copied["path"])
    try:
        text = Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    source = Source(short_name(Path(name), Path.cwd()), text)
    line = source.line(int(number))
    span = source.span(int(number), len(line) - len(line.lstrip()) + 1, max(1, len(line.strip())))
    return Label(span, " ".join(evidence[:1]).replace("`", ""))


def _last_words(lines: Sequence[str]) -> list[str]:
    """The last lines of a log; one alone stands in its sentence."""
    if len(lines) < 2:  # noqa: PLR2004 - one line
        return [f"its last words: `{line.strip()}`" for line in lines]
    return ["its last words:", *(f"  {line}" for line in lines)]


def _plain(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
