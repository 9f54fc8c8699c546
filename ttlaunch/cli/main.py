"""The `ttlaunch` command: its subcommands and its version."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ttlaunch import __version__
from ttlaunch.cli.completion import completing_in_bash
from ttlaunch.cli.console import print_lines, reporting_errors, reports_errors
from ttlaunch.cli.last_resort import status_of, telling_output_apart
from ttlaunch.cli.mistakes import describe, format_of, is_mistake
from ttlaunch.cli.words import CommandAfterDashes, QuickCommand, convert_little


def _paragraphs(function: Callable[..., None]) -> str:
    """Join the lines of each paragraph of a docstring, so that only the terminal's width breaks lines."""
    return "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))


class _Commands(TyperGroup):
    """The subcommands; mistakes in what was typed are diagnostics, in the format that was asked for."""

    def make_context(self, info_name: str | None, args: list[str], *arguments: Any, **options: Any) -> Any:
        args[:] = _renamed(args)
        self._words = list(args)
        with _describing_mistakes(self._words):
            make = super().make_context  # prints help texts
            return telling_output_apart(lambda: make(info_name, args, *arguments, **options), only_prints=True)

    def get_params(self, ctx: Any) -> Any:
        return convert_little(self, super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        with _describing_mistakes(self._words):
            invoke = super().invoke
            return telling_output_apart(lambda: invoke(ctx))


_FORMERLY_OUT = {
    "init": "--dir",
    "parity": "--results",
    "place": "--write",
    "plan": "--write",
    "schema": "--write",
    "show": "--svg",
    "simulate": "--keep",
}
"""By command, the option that is `--out` today; scripts may still use it."""


def _renamed(words: list[str]) -> list[str]:
    """Return a command line with the present name in place of a former name of an option."""
    former = _FORMERLY_OUT.get(words[0]) if words else None
    end = words.index("--") if "--" in words else len(words)
    if former is None:
        return words
    return [
        f"--out{word.removeprefix(former)}" if word.partition("=")[0] == former else word for word in words[:end]
    ] + words[end:]


@contextmanager
def _describing_mistakes(words: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_mistake(error):
            raise
        with reporting_errors(form=format_of(words)):
            raise describe(error, words) from error


_PANELS = {
    "Run": ("run", "submit", "plan", "attach", "stop", "repro", "join", "workers", "serve", "generate"),
    "Look": (
        "ps",
        "dashboard",
        "logs",
        "report",
        "metrics",
        "diff",
        "bisect",
        "replay",
        "verify",
        "runs",
        "grafana",
        "explain",
    ),
    "Hosts": ("doctor", "prepare", "sync"),
    "Files": (
        *("init", "hosts", "export", "validate", "show", "place", "configs", "recipes"),
        *("data", "weights", "convert", "schema"),
    ),
    "Lab": ("advise", "simulate", "parity", "compare", "chaos"),
}
"""By panel of the help text, the commands; each is a module of this package."""
_PASS_ON_A_COMMAND = ("run", "submit", "plan", "chaos", "export")


@cache
def make_app(word: str = "") -> typer.Typer:
    """Make the command line with one command, or with all commands if the word is the name of none.

    Only those commands are imported: importing all of them takes a quarter of the time of a short command.
    """
    app = typer.Typer(
        name="ttlaunch",
        cls=_Commands,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Start and supervise distributed training from a description of the hardware.",
        epilog="First run: [bold]ttlaunch run hierarchical_parallel[/bold]   What would happen: [bold]ttlaunch plan …[/bold]",
    )
    app.callback()(_root)
    known = {name: panel for panel, names in _PANELS.items() for name in names}
    for name in [word] if word in known else known:
        _add_command(app, name, panel=known[name])
    return app


def _add_command(app: typer.Typer, name: str, *, panel: str) -> None:
    """Add a module's command, or its group of commands, under the module's name."""
    module = import_module(f"ttlaunch.cli.{name}")
    if hasattr(module, "app"):
        for command in module.app.registered_commands:
            command.callback = reports_errors(command.callback)
        app.add_typer(module.app, name=name, rich_help_panel=panel)
        return
    function = getattr(module, name)
    add = app.command(
        name,
        cls=CommandAfterDashes if name in _PASS_ON_A_COMMAND else QuickCommand,
        help=_paragraphs(function),
        epilog=module.EXAMPLES,
        rich_help_panel=panel,
    )
    add(reports_errors(function))


def _print_version(value: bool) -> None:
    if value:
        print_lines([f"ttlaunch {__version__}"])
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare the options of `ttlaunch` itself; the help text is that of the app."""


def __getattr__(name: str) -> typer.Typer:
    """Make `app`, the command line with all commands, for the generator of the documentation and for tests."""
    if name != "app":
        raise AttributeError(name)
    return make_app()


def main() -> None:
    """Run the command line."""
    _make_streams_usable()
    if os.environ.get("NO_COLOR"):
        from typer import rich_utils

        rich_utils.COLOR_SYSTEM = None  # else help texts would keep bold and dim text
    sys.exit(completing_in_bash(lambda: status_of(_run_app)))


def _run_app() -> int:
    make_app(*sys.argv[1:2])()  # ends by raising SystemExit
    return 0


def _make_streams_usable() -> None:
    """Make printing safe: a closed stream drops text, and one that is not UTF-8 replaces characters."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
