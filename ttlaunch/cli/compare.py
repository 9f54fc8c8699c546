"""`ttlaunch compare`: run recipes on the same model, data and seed, and compare them in one table."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.signals import interruptible
from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics, tabbed
from ttlaunch.cli.options import On, Overrides
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import (
    Diagnostic,
    Format,
    LaunchError,
    Severity,
    counted,
    file_error,
    listed,
    shown,
    usage_error,
    usage_mistake,
)
from ttlaunch.planning.comparison import Candidate, Workload, parse_candidate

if TYPE_CHECKING:
    from ttlaunch.lab.comparison.repeats import Attempt

EXAMPLES = """\
[bold]ttlaunch compare[/bold]   every recipe that trains, three times each; takes some minutes

[bold]ttlaunch compare data_parallel zero local_sgd --steps 100[/bold]   some recipes, for more steps

[bold]ttlaunch compare data_parallel data_parallel:data_parallel_config.reduction=fast[/bold]   one recipe in two forms

[bold]ttlaunch compare --set transformer_config.num_blocks=8 --out big[/bold]   your own model; after Ctrl-C, the same command continues
"""


def compare(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE[:KEY=VALUE,…]]...",
            help="Recipes, each with its own changes. Default: all recipes that train a model.",
            show_default=False,
        ),
    ] = None,
    *,
    steps: Annotated[int, typer.Option(min=4, metavar="N", help="Optimizer steps of each run.")] = 60,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each recipe.")] = 3,
    overrides: Overrides = None,
    on: On = "local",
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the table, the picture and the runs.")
    ] = Path("comparison"),
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="full: a table; concise: one tab-separated line per recipe; json; github: a table and CI annotations.",
        ),
    ] = Format.FULL,
) -> None:
    """Run recipes on the same model, data and seed, one after the other, and compare the results.

    Each recipe runs with the number of ranks in its own training file. The folder of `--out` gets `comparison.md`,
    `comparison.json`, `comparison.svg`, `loss.svg` (the training loss over steps, seconds and bytes) and `runs/`. The same
    command continues after Ctrl-C and does not repeat finished runs. If a recipe fails, the others still run, and the exit status is 1.
    """
    from ttlaunch.cli.compare_picture import draw_comparison, draw_loss_curves
    from ttlaunch.lab.comparison.repeats import Comparison
    from ttlaunch.lab.comparison.summary import HEADING, cells, heading, render_json, render_markdown, summarise

    workload = Workload(steps, tuple(overrides or ()))
    candidates = list(dict.fromkeys(map(parse_candidate, recipes))) if recipes else _all_candidates()
    _check_candidates(candidates, workload, on=on, are_named=bool(recipes))
    try:
        out.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(workload, on=on, folder=out, repeats=repeats)
        attempts = _run_all(comparison.attempts(candidates), out, total=len(candidates) * repeats, form=form)
        rows, machine = summarise(attempts), _machine()
        content = render_json(rows, workload, machine=machine, repeats=repeats)
        (out / "comparison.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (out / "comparison.md").write_text(render_markdown(rows, workload, machine=machine), encoding="utf-8")
        (out / "comparison.svg").write_text(draw_comparison(content), encoding="utf-8")
        (out / "loss.svg").write_text(draw_loss_curves(content), encoding="utf-8")
    except OSError as error:
        raise file_error(out, error, verb="used") from error
    failures = [_failure(attempt) for attempt in attempts if attempt.error is not None]
    if form is Format.JSON:
        print_json({**content, "diagnostics": [one.as_json() for one in failures]}, schema="compare")
    elif form is Format.CONCISE:
        print_lines(tabbed(cells(row)) for row in rows)
    else:
        written = f"written: {out}/comparison.md, {out}/comparison.json, {out}/comparison.svg, {out}/loss.svg"
        print_lines([*render_table([heading(rows), *map(cells, rows)], right=range(2, len(HEADING))), "", written])
    show_diagnostics(failures, form=form)
    exit_with(contract.STATUS_RANK_FAILED if failures else contract.STATUS_DONE)


def _check_candidates(candidates: Sequence[Candidate], workload: Workload, *, on: str, are_named: bool) -> None:
    """Refuse to start if one of the named recipes cannot run, or if no recipe at all can."""
    if workload.sets_steps:
        hint = "`--steps` sets the number of steps of every run"
        raise usage_error("`--set training_config.steps` is given to `compare`", hint)
    found = [_mistakes(one, workload, on=on) for one in candidates]
    if any(found) if are_named else all(found):
        mistakes = {str(one.as_json()): one for group in found for one in group}
        raise LaunchError([replace(one, notes=_notes(one, found, candidates)) for one in mistakes.values()])


def _notes(
    mistake: Diagnostic, found: Sequence[Sequence[Diagnostic]], candidates: Sequence[Candidate]
) -> tuple[str, ...]:
    """Return the mistake's notes; if it points at a file and only some candidates have it, add a note that lists them."""
    text = mistake.as_json()
    owners = [
        str(one) for one, group in zip(candidates, found, strict=True) if text in [each.as_json() for each in group]
    ]
    lists_owners = len(owners) < len(candidates) and mistake.primary
    return (*mistake.notes, f"of {listed(owners)}") if lists_owners else mistake.notes


def _mistakes(candidate: Candidate, workload: Workload, *, on: str) -> list[Diagnostic]:
    """Report why a candidate cannot run."""
    from ttlaunch.app.resolve import resolve
    from ttlaunch.app.run_spec import RunSpec
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe

    found = find_recipe(candidate.recipe, working_folder=Path.cwd())
    if isinstance(found, Diagnostic):
        name, colon, changes = candidate.recipe.partition(":")
        is_known = bool(colon) and not isinstance(find_recipe(name, working_folder=Path.cwd()), Diagnostic)
        what = f"`{shown(changes)}`" if changes else "what"
        message = f"{what} after `{shown(name)}:` is not KEY=VALUE"
        return [usage_mistake(message, f"`{shown(name)}:KEY=VALUE,KEY=VALUE`") if is_known else found]
    recipe = load_recipe(found)
    if not isinstance(recipe, Diagnostic) and not recipe.uses_data:
        return [usage_mistake(f"{candidate.recipe} trains no model, so there is nothing to compare")]
    settings = (*workload.settings(), *candidate.overrides)
    request = RunSpec(target=candidate.recipe, on=on, overrides=settings)
    described = resolve(request, dialogue=TerminalDialogue(Format.FULL))
    return [one for one in described.diagnostics if one.severity is Severity.ERROR]


def _all_candidates() -> list[Candidate]:
    """Return each recipe that trains a model on text."""
    from ttlaunch.app.inspect_recipes import inspect_recipes

    return [Candidate(recipe.found.name) for recipe in inspect_recipes(Path.cwd()) if recipe.uses_data]


def _run_all(found: "Iterator[Attempt]", out: Path, *, total: int, form: Format) -> "list[Attempt]":
    """Collect the attempts while they run, report each on stderr, and exit if Ctrl-C is pressed."""
    attempts: list[Attempt] = []
    with interruptible():
        try:
            for attempt in found:
                attempts.append(attempt)
                if form is not Format.JSON:
                    print_lines([f"{_progress(attempt, number=len(attempts), total=total)}"], to=sys.stderr)
        except KeyboardInterrupt:
            kept = sum(attempt.measured is not None for attempt in attempts)
            if form is Format.JSON:
                print_json({"interrupted": True, "runs": kept, "planned": total}, schema="compare")
            runs = f"{kept} of {counted(total, 'run')}"
            print_lines(
                [f"interrupted after {runs}; they are kept in {out}, and the same command continues"], to=sys.stderr
            )
            exit_with(contract.STATUS_INTERRUPTED)
    return attempts


def _progress(attempt: "Attempt", *, number: int, total: int) -> str:
    found = attempt.measured
    begin = f"{number} of at most {total}: {attempt.candidate}, run {attempt.repeat}"
    if found is None:
        return f"{begin}: failed"
    kept = ", kept from before" if attempt.was_kept else ""
    speed = f"{found.steps_per_s:.1f} steps/s" if found.steps_per_s else "too short to be timed"
    loss = f", loss {found.loss:.3f}" if found.loss is not None else ""
    return f"{begin}: {speed}{loss}{kept}"


def _machine() -> str:
    import platform

    return f"{counted(len(os.sched_getaffinity(0)), 'core')}, {platform.machine()}, Python {platform.python_version()}"


def _failure(attempt: "Attempt") -> Diagnostic:
    message = f"{attempt.candidate} cannot be compared: {attempt.error}"
    return Diagnostic("R062", message, hints=(f"`{attempt.command}` repeats it",))
