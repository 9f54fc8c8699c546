"""Diagnostics of mistakes: where each one is, which rule it breaks, what repairs it.

A `Diagnostic` has a stable code (`T011`), a first line that makes sense alone, labels that point into files, and
hints. Checks yield diagnostics; nobody below `cli/` prints them. `explain` has a page for every code.
"""

from ttlaunch.diagnostics.count import counted, render_duration, render_size
from ttlaunch.diagnostics.diagnostic import Blame, Diagnostic, KeyMistake, Label, Severity, exit_status, has_errors
from ttlaunch.diagnostics.launch_error import LaunchError, file_error, usage_error, usage_mistake
from ttlaunch.diagnostics.render import Format, render, render_json
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import closest, did_you_mean, listed, shown

__all__ = [
    "Blame",
    "Diagnostic",
    "Format",
    "KeyMistake",
    "Label",
    "LaunchError",
    "Severity",
    "Source",
    "Span",
    "closest",
    "counted",
    "did_you_mean",
    "exit_status",
    "file_error",
    "has_errors",
    "listed",
    "render",
    "render_duration",
    "render_json",
    "render_size",
    "shown",
    "usage_error",
    "usage_mistake",
]
