"""`ttlaunch diff`: show how two runs differ, and from which step on their losses differ."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.app.named_run import find_named_run, unreadable_run
from ttlaunch.cli.console import print_json, print_lines, tabbed
from ttlaunch.cli.options import OutputFormat, RunsDir
from ttlaunch.diagnostics import Format, counted, shown

if TYPE_CHECKING:
    from ttlaunch.running.readers.differences import RunDifferences

EXAMPLES = """\
[bold]ttlaunch diff 3fa1 77b2[/bold]   differences in program, placement, configuration, code, environment and results, and the first step with other losses

[bold]ttlaunch diff 3fa1 latest --format json[/bold]   the same as JSON
"""
_LONGEST = 80


def diff(
    left: Annotated[str, typer.Argument(metavar="RUN", help="A run's id or a part of it, a path, or `latest`.")],
    right: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.")],
    *,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """Compare two runs. The exit status is 0 whether or not they differ."""
    from ttlaunch.running.readers.differences import find_differences

    paths = [find_named_run(name, runs_dir=runs_dir) for name in (left, right)]
    try:
        found = find_differences(*paths)
    except (OSError, ValueError) as error:
        raise unreadable_run(paths[0] if str(paths[0]) in str(error) else paths[1], error) from error
    if form is Format.JSON:
        print_json(
            {
                "runs": [path.name for path in paths],
                "same": found.same,
                "compared": found.compared,
                "differences": [asdict(difference) for difference in found.differences],
                "losses": [asdict(loss) for loss in found.losses],
            },
            schema="diff",
        )
        return
    lines = _lines(paths, found) if form is not Format.CONCISE else _concise(found)
    print_lines(lines)


def _lines(paths: Sequence[Path], found: "RunDifferences") -> Iterator[str]:
    yield f"{paths[0].name} → {paths[1].name}"
    for section, compared in found.compared.items():
        differences = [difference for difference in found.differences if difference.section == section]
        words = counted(len(differences), "difference") if differences else "the same"
        values = counted(compared, "value")
        yield f"{section}: {words}, {values} compared" if compared else f"{section}: nothing to compare"
        for one in differences:
            yield f"  {one.name}: {_value(one.left, one.left_origin)} → {_value(one.right, one.right_origin)}"
    for loss in found.losses:
        if loss.first_step is not None:
            yield f"{loss.kind}: differs from step {loss.first_step} on, {loss.left!r} → {loss.right!r}"
        elif loss.common_steps:
            yield f"{loss.kind}: equal in {counted(loss.common_steps, 'common step')}, to the last bit"
    if any(loss.first_step is not None for loss in found.losses):
        yield f"`ttlaunch bisect {paths[0].name} {paths[1].name}` finds tensor, layer, micro-batch and cause"


def _concise(found: "RunDifferences") -> Iterator[str]:
    for one in found.differences:
        yield tabbed((one.section, one.name, _value(one.left, None), _value(one.right, None)))
    for loss in found.losses:
        if loss.first_step is not None:
            yield tabbed((loss.kind, f"step {loss.first_step}", repr(loss.left), repr(loss.right)))


def _value(value: str | None, origin: str | None) -> str:
    text = "–" if value is None else shown(value, longest=_LONGEST)
    return f"{text} ({origin})" if origin else text
