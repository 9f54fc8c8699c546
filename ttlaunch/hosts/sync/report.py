"""What there is to say about a sync: what is left out, what cannot be read, which host could not take the code in."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Severity, Source, listed, shown
from ttlaunch.diagnostics.count import counted
from ttlaunch.errors import SyncError
from ttlaunch.hosts.sync.collect import Collected
from ttlaunch.hosts.sync.ignore import OWN_RULES, UselessLine
from ttlaunch.hosts.sync.manifest import LINK, Entry
from ttlaunch.hosts.sync.read_files import UnreadableError, name_of
from ttlaunch.hosts.sync.sizes import render_size

if TYPE_CHECKING:
    from ttlaunch.hosts.sync.answers import Outcome

LARGEST_UNASKED_BYTES = 1024**3
"""More than this, to all hosts together, is only sent when somebody has said yes."""


def check_collected(found: Collected, *, root: Path) -> Iterator[Diagnostic]:
    """What of the project stays behind, and why."""
    if found.without_git is not None:
        message = f"git cannot be asked what belongs to the project in {root}: {found.without_git}"
        notes = (".gitignore files are obeyed, but tracked files that they match are left out",)
        yield Diagnostic("S007", message, notes=notes, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
    hints: tuple[str, ...]
    if found.secrets:
        names = [name_of(path) for path in found.secrets]
        stay = "stays here" if len(names) == 1 else "stay here"
        message = f"{counted(len(names), 'file')} that may hold secrets {stay}: {listed(names, last='and')}"
        hints = (f"to copy it all the same, put `!{names[0]}` into .ttlaunchignore",)
        yield Diagnostic("S001", message, hints=hints, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
    if found.special:
        names = [name_of(path) for path in found.special]
        message = f"a named pipe, socket or device cannot be copied: {listed(names, last='and')}"
        yield Diagnostic("S002", message, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
    yield from (_explain_useless(line) for line in found.useless)
    for path, error in sorted(found.unreadable.items()):
        reason = (error.strerror or str(error)).lower()
        if os.path.basename(path) == OWN_RULES:
            hints = ("`.ttlaunchignore` is to be a file with a pattern on each line",)
        else:
            hints = (f"or leave it out: put `{name_of(path)}` into .ttlaunchignore",)
        yield Diagnostic(
            "S004", f"{name_of(path) or root} cannot be read: {reason}", hints=hints, blame=Blame.CODE_SYNC
        )


def _explain_useless(line: UselessLine) -> Diagnostic:
    """An error in our own rules, whose author may count on it; git skips it in its own without a word, we with one."""
    text = "\n".join(each.encode("utf-8", "backslashreplace").decode() for each in line.lines)
    source = Source(name_of(line.file), text)
    written = source.line(line.number)
    ours = os.path.basename(line.file) == OWN_RULES
    return Diagnostic(
        "S017",
        f"line {line.number} of {source.name} is no pattern: `{shown(written)}`",
        Label(source.span(line.number, 1, max(1, len(written))), "matches nothing"),
        notes=() if ours else ("it is skipped, as git does",),
        hints=("a `\\` stands before the character that it takes literally, a `!` before a pattern",),
        severity=Severity.ERROR if ours else Severity.WARNING,
        blame=Blame.CODE_SYNC,
    )


def check_links(entries: Iterable[Entry], *, into: bytes) -> Iterator[Diagnostic]:
    """Links out of the project, which lead to whatever a host has there."""
    for entry in entries:
        if entry.kind != LINK:
            continue
        goal = os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.content))
        if goal != into and not goal.startswith(into + b"/"):
            name = name_of(entry.path[len(into) + 1 :])
            message = f"the link {name} leads out of the project, to {name_of(entry.content)}"
            notes = ("it is copied as a link: on a host it leads to what that host has there, or nowhere",)
            yield Diagnostic("S003", message, notes=notes, severity=Severity.WARNING, blame=Blame.CODE_SYNC)


def check_read(errors: Iterable[UnreadableError], *, root: Path) -> Iterator[Diagnostic]:
    """Files that could not be read."""
    for error in errors:
        path = name_of(os.path.relpath(error.path, os.fsencode(root)))
        name = path if not path.startswith("../") else name_of(error.path)
        if error.changes:
            message = f"{name} changes all the time: {error.reason}"
            yield Diagnostic("S005", message, hints=(f"put `{name}` into .ttlaunchignore",), blame=Blame.CODE_SYNC)
        else:
            hints = (f"or leave it out: put `{name}` into .ttlaunchignore",)
            yield Diagnostic("S004", f"{name} cannot be read: {error.reason}", hints=hints, blame=Blame.CODE_SYNC)


def check_size(outcome: "Outcome", *, allowed: int = LARGEST_UNASKED_BYTES) -> Diagnostic | None:
    """Whether a dry run says that too much would be sent without asking."""
    from ttlaunch.hosts.sync.answers import Planned  # noqa: PLC0415 - it needs this module

    plans = [plan for plan in outcome.hosts.values() if isinstance(plan, Planned)]
    total = sum(plan.bytes for plan in plans)
    if total <= allowed:
        return None
    largest = max(outcome.release.manifest.entries, key=lambda entry: entry.size)
    several = counted(sum(plan.bytes > 0 for plan in plans), "host")
    message = f"{render_size(total)} would be sent to {several}, more than {render_size(allowed)}"
    notes = (f"the largest file is {name_of(largest.path.partition(b'/')[2])}: {render_size(largest.size)}",)
    hints = ("`--yes` sends it; a .ttlaunchignore file leaves files out",)
    return Diagnostic("S006", message, notes=notes, hints=hints, blame=Blame.CODE_SYNC)


def check_synced(outcome: "Outcome") -> list[Diagnostic]:
    """Hosts that could not take the code in, and what is worth knowing of those that could.

    A host that could not even be reached, a `HostError` that is no `SyncError`, is left to whoever explains those.
    """
    from ttlaunch.hosts.sync.answers import Planned, Synced  # noqa: PLC0415 - it needs this module

    found = []
    for host, answer in outcome.hosts.items():
        if isinstance(answer, SyncError):
            found.append(
                Diagnostic(answer.code, answer.evidence, notes=answer.notes, hints=answer.hints, blame=Blame.CODE_SYNC)
            )
        elif isinstance(answer, Synced | Planned):
            found += _warnings(host, answer.differing_data, answer.repaired)
    return found


def _warnings(host: str, differing: Sequence[str], repaired: Sequence[str]) -> Iterator[Diagnostic]:
    for path in differing:
        message = f"{host} has another text at {path} than the launching machine; the launching machine's is used"
        yield Diagnostic("S012", message, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
    if repaired:
        names = [name_of(os.fsencode(path)) for path in repaired]
        message = f"code on {host} had been changed there and was put right: {listed(names, last='and')}"
        yield Diagnostic("S014", message, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
