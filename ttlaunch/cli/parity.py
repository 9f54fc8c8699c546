"""`ttlaunch parity`: train the same small model in every layout and compare the bits."""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.signals import interruptible
from ttlaunch.cli.console import exit_with, print_json, print_lines, print_progress, show_diagnostics, tabbed
from ttlaunch.diagnostics import (
    Diagnostic,
    Format,
    LaunchError,
    counted,
    file_error,
    listed,
    usage_error,
    usage_mistake,
)
from ttlaunch.planning.parity import (
    ACCUMULATIONS,
    MODELS,
    PRECISIONS,
    RECIPES,
    SEQUENCES,
    Cell,
    class_names,
    matrix,
    world_sizes,
)

if TYPE_CHECKING:
    from ttlaunch.lab.parity import Result

EXAMPLES = """\
[bold]ttlaunch parity[/bold]   every layout with real ranks on this machine; takes some minutes

[bold]ttlaunch parity --simulate --jobs 2[/bold]   each cell in one process, without mpirun

[bold]ttlaunch parity --recipe pipeline_parallel --ranks 4[/bold]   part of the matrix

[bold]ttlaunch parity --steps 200 --out bits.jsonl[/bold]   after an interruption, the same command continues
"""

_WIDTHS = (9, 14, 5, 12, 5, 10, 9, 9, 8, 7)
_HEADINGS = (
    "precision",
    "layout",
    "ranks",
    "accumulation",
    "class",
    "difference",
    "sent",
    "÷formula",
    "memory",
    "time",
)


def parity(
    *,
    recipes: Annotated[
        list[str] | None, typer.Option("--recipe", metavar="RECIPE", help=f"One of {', '.join(RECIPES)}. Repeatable.")
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", "-n", min=1, metavar="N", help="World sizes to try. Repeatable.")
    ] = None,
    accumulation: Annotated[
        list[int] | None,
        typer.Option(
            metavar="K", help=f"Accumulations in a step of {SEQUENCES} sequences. Default: 1 and 3. Repeatable."
        ),
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"One of {', '.join(PRECISIONS)}. Repeatable.")
    ] = None,
    model: Annotated[str, typer.Option(metavar="TYPE", help=f"The model's type: {' or '.join(MODELS)}.")] = MODELS[0],
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Optimizer steps of each training.")] = 20,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Run all ranks of a cell in one process, without mpirun.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Number of cells to run at the same time.")] = 1,
    results: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Store results in this file, and reuse those that the same code has stored there.",
        ),
    ] = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="full: a table; concise: one tab-separated line per cell; json; github: a table and CI annotations.",
        ),
    ] = Format.FULL,
) -> None:
    """Train the same small model in every layout and compare the bits.

    Each row of the table is one training. "class" is a letter for the SHA-256 over all parameters; all rows of a precision must
    have the same letter, or the exit status is 1. The first row of a precision is one process; "difference" is the largest
    difference of any parameter to it. "sent" is what all ranks sent, and its ratio to the recipe's formula.
    """
    mistakes = [
        *_strangers("--recipe", recipes, RECIPES, notes=(_OTHERS,)),
        *_strangers("--precision", precision, PRECISIONS),
        *_strangers("--model", [model], MODELS),
        *_strangers("--accumulation", accumulation, [k for k in range(1, SEQUENCES + 1) if SEQUENCES % k == 0]),
    ]
    if not mistakes:
        mistakes = [*_unknown_sizes(recipes or RECIPES, ranks or ())]
    if mistakes:
        raise LaunchError(mistakes)
    cells = matrix(
        recipes=recipes or RECIPES,
        ranks=ranks or (),
        accumulations=accumulation or ACCUMULATIONS,
        precisions=precision or PRECISIONS,
        model=model,
    )
    if len(cells) == len({cell.precision for cell in cells}):  # there are only the references
        message = f"nothing would be compared: all that is left is {cells[0]}"
        raise usage_error(message, "try more world sizes or accumulations")
    found = _run_all(cells, steps=steps, simulated=simulated, jobs=jobs, kept=results, form=form)
    diagnostics = _diagnostics(found)
    if form is Format.JSON:
        print_json({"cells": _as_json(found), "diagnostics": [one.as_json() for one in diagnostics]}, schema="parity")
    else:
        print_lines([] if form is Format.CONCISE else _verdict(found))
        show_diagnostics(diagnostics, form=form)
    exit_with(contract.STATUS_RANK_FAILED if diagnostics else contract.STATUS_DONE)


_OTHERS = "these end with the bits of one process; torch, as in fully_sharded, adds in another order, and other recipes may differ"


def _strangers(
    option: str, given: Sequence[object] | None, known: Sequence[object], *, notes: tuple[str, ...] = ()
) -> Iterator[Diagnostic]:
    for value in given or ():
        if value not in known:
            yield usage_mistake(f"`{option} {value}` is not among {listed(list(map(str, known)))}", notes=notes)


def _unknown_sizes(recipes: Sequence[str], ranks: Sequence[int]) -> Iterator[Diagnostic]:
    """Refuse world sizes that no layout has, because nothing would be compared."""
    known = world_sizes(recipes)
    for size in ranks:
        if size not in known:
            yield usage_mistake(
                f"no layout has {counted(size, 'rank')}; those of {listed(recipes, last='and')} have {known[0]} to {known[-1]}"
            )


def _run_all(
    cells: Sequence[Cell], *, steps: int, simulated: bool, jobs: int, kept: Path | None, form: Format
) -> "list[Result]":
    """Run all cells, and print each row as soon as all rows before it are printed."""
    from ttlaunch.lab.parity import Parity

    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="ttl-parity-") as scratch, interruptible():
        try:
            run = Parity(steps=steps, simulated=simulated, jobs=jobs, scratch=Path(scratch), kept=kept)
            if form not in {Format.JSON, Format.CONCISE}:
                print_lines([_row(_HEADINGS)])
            for result in run.results(cells):
                found.append(result)
                _show(result, found, total=len(cells), form=form)
        except KeyboardInterrupt:
            print_progress("")
            print_lines([f"interrupted after {len(found)} of {counted(len(cells), 'cell')}"], to=sys.stderr)
            exit_with(contract.STATUS_INTERRUPTED)
        except OSError as error:
            if kept is None or error.filename != str(kept):
                raise
            print_progress("")
            raise file_error(kept, error, verb="used for results") from error
    return found


def _show(result: "Result", found: "Sequence[Result]", *, total: int, form: Format) -> None:
    print_progress("")
    if form is not Format.JSON:
        letter = "–" if result.sha256 is None else _classes(found)[result.sha256]
        cell = result.cell
        memory = "–" if result.memory_bytes is None else f"{result.memory_bytes / 1e6:.0f} MB"
        difference = "–" if result.difference is None else f"{result.difference:.1e}" if result.difference else "0"
        time = "kept" if result.was_kept else f"{result.seconds:.1f} s"
        first = (cell.precision, cell.layout, cell.ranks, cell.accumulation, letter, difference)
        values = (*first, *_traffic(result), memory, time)
        print_lines([tabbed(values) if form is Format.CONCISE else _row(values)])
    if len(found) < total:
        print_progress(f"{len(found)} of {counted(total, 'cell')}")


def _traffic(result: "Result") -> tuple[str, str]:
    """Render the bytes that all ranks sent, and their ratio to the recipe's formula."""
    sent, formula = result.sent_bytes, result.formula_bytes
    ratio = "–" if sent is None or formula is None else f"{sent / formula:.3f}" if formula else "1" if not sent else "∞"
    return "–" if sent is None else f"{sent / 1e6:.2f} MB", ratio


def _row(values: Sequence[object]) -> str:
    left = [f"{value!s:<{width}}" for value, width in zip(values[:2], _WIDTHS[:2], strict=True)]
    right = [f"{value!s:>{width}}" for value, width in zip(values[2:], _WIDTHS[2:], strict=True)]
    return "  ".join([*left, *right])


def _classes(found: "Sequence[Result]") -> dict[str, str]:
    return class_names([result.sha256 for result in found if result.sha256 is not None])


def _as_json(found: "Sequence[Result]") -> list[dict[str, object]]:
    classes = _classes(found)
    return [{**result.as_json(), "class": classes.get(result.sha256 or "")} for result in found]


def _verdict(found: "Sequence[Result]") -> list[str]:
    classes, lines = _classes(found), []
    for precision in dict.fromkeys(result.cell.precision for result in found):
        hashes = Counter(r.sha256 for r in found if r.cell.precision == precision and r.sha256 is not None)
        parts = [f"{counted(count, 'cell')} in class {classes[text]} ({text})" for text, count in hashes.items()]
        lines.append(f"{precision}: {', '.join(parts) or 'nothing'}")
    return lines


def _diagnostics(found: "Sequence[Result]") -> list[Diagnostic]:
    """Report the first cell that failed, and the first one whose bits differ from its precision's reference."""
    diagnostics = []
    failed = [result for result in found if result.sha256 is None]
    if failed:
        first = failed[0]
        message = f"{first.cell} did not come to its end: {first.error}"
        hint = f"`{first.command}` repeats it"
        diagnostics.append(Diagnostic("R041", message, notes=_others(len(failed)), hints=(hint,)))
    references = {result.cell.precision: result for result in reversed(found)}
    different = [r for r in found if r.sha256 not in {None, references[r.cell.precision].sha256}]
    if different and references[different[0].cell.precision].sha256 is not None:
        first, reference = different[0], references[different[0].cell.precision]
        message = f"{first.cell}: the parameters differ from those of one process by up to {first.difference:.1e}"
        notes = (f"SHA-256 {first.sha256}, expected {reference.sha256}", *_others(len(different)))
        hints = (f"`{first.command}` repeats it", f"`{reference.command}` is one process")
        diagnostics.append(Diagnostic("R040", message, notes=notes, hints=hints))
    return diagnostics


def _others(count: int) -> tuple[str, ...]:
    return (f"and {counted(count - 1, 'other cell')}",) if count > 1 else ()
