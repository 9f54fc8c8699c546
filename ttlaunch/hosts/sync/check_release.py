"""Report what a release leaves out and why, and what of it cannot be read, before any host is asked."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ttlaunch.diagnostics import Blame, Diagnostic, Label, Severity, Source, listed, shown
from ttlaunch.diagnostics.count import counted
from ttlaunch.hosts.sync.ignore import OWN_RULES, UselessLine
from ttlaunch.hosts.sync.listing import Listing
from ttlaunch.hosts.sync.manifest import LINK, Entry
from ttlaunch.hosts.sync.read_files import UnreadableError, name_of
from ttlaunch.system_reason import system_reason


def check_collected(found: Listing, *, root: Path) -> Iterator[Diagnostic]:
    """Report what of the project is not copied, and why."""
    if found.without_git is not None:
        message = f"git cannot be asked what belongs to the project in {root}: {found.without_git}"
        notes = (".gitignore files are obeyed, but tracked files that they match are left out",)
        yield Diagnostic("S007", message, notes=notes, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
    yield from check_secrets(found)
    if found.special:
        names = [name_of(path) for path in sorted(found.special)]
        message = f"a named pipe, socket or device cannot be copied: {listed(names, last='and')}"
        yield Diagnostic("S002", message, severity=Severity.WARNING, blame=Blame.CODE_SYNC)
    yield from (_explain_useless(line) for line in found.useless)
    for path, error in sorted(found.unreadable.items()):
        reason = system_reason(error)
        hints: tuple[str, ...]
        if os.path.basename(path) == OWN_RULES:
            hints = ("`.ttlaunchignore` is to be a file with a pattern on each line",)
        else:
            hints = (f"or leave it out: put `{name_of(path)}` into .ttlaunchignore",)
        yield Diagnostic(
            "S004", f"{name_of(path) or root} cannot be read: {reason}", hints=hints, blame=Blame.CODE_SYNC
        )


def check_secrets(found: Listing, *, inside: Path | None = None) -> Iterator[Diagnostic]:
    """Report which files of a folder are not copied because they may hold secrets; `inside` is the folder if it is not the project."""
    if not found.secrets:
        return
    names = [name_of(path) for path in sorted(found.secrets)]
    where = f" in {name_of(os.fsencode(inside))}" if inside else ""
    stay = "stays here" if len(names) == 1 else "stay here"
    message = f"{counted(len(names), 'file')}{where} that may hold secrets {stay}: {listed(names, last='and')}"
    hints = (f"to copy it all the same, put `!{names[0]}` into .ttlaunchignore{where}",)
    yield Diagnostic("S001", message, hints=hints, severity=Severity.WARNING, blame=Blame.CODE_SYNC)


def explain_changing(root: Path, *, times: int) -> Diagnostic:
    """Explain that no two readings of the project found the same files."""
    message = f"the files in {name_of(os.fsencode(root))} change all the time: they were read {times} times"
    hints = ("wait until whatever writes them has ended, or leave them out: put their paths into .ttlaunchignore",)
    return Diagnostic("S005", message, hints=hints, blame=Blame.CODE_SYNC)


def _explain_useless(line: UselessLine) -> Diagnostic:
    """Report a line that is no pattern: an error in `.ttlaunchignore`, a warning in `.gitignore`, where git skips it silently."""
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
    """Report links to places outside the project, where a host may have another file or none."""
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
    """Report files that could not be read."""
    for error in errors:
        path = name_of(os.path.relpath(error.path, os.fsencode(root)))
        name = path if not path.startswith("../") else name_of(error.path)
        if error.changes:
            message = f"{name} changes all the time: {error.reason}"
            yield Diagnostic("S005", message, hints=(f"put `{name}` into .ttlaunchignore",), blame=Blame.CODE_SYNC)
        else:
            hints = (f"or leave it out: put `{name}` into .ttlaunchignore",)
            yield Diagnostic("S004", f"{name} cannot be read: {error.reason}", hints=hints, blame=Blame.CODE_SYNC)
