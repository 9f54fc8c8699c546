"""`ttlaunch bisect`: find the first step, tensor, layer and micro-batch at which two runs part, and why."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.named_run import find_named_run
from ttlaunch.cli.console import exit_with, print_json, print_lines, tabbed
from ttlaunch.cli.options import Env, OutputFormat, RunsDir, Verbose
from ttlaunch.diagnostics import Format, counted, listed, shown, usage_error
from ttlaunch.running.runs.facts import run_folders

if TYPE_CHECKING:
    from ttlaunch.lab.bisect import Bisection, Contradiction, Parting

EXAMPLES = """\
[bold]ttlaunch bisect 3fa1 77b2[/bold]   where two runs part: step, tensor, layer, micro-batch, and the cause

[bold]ttlaunch bisect[/bold]   the two newest runs

[bold]ttlaunch bisect 3fa1 latest --format json[/bold]   the same as JSON
"""
_LONGEST = 200
_MOST_NAMED = 3


def bisect(
    left: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN",
            help="A run's id or a part of it, a path, or `latest`; by default the two newest runs.",
            show_default=False,
        ),
    ] = None,
    right: Annotated[
        str | None, typer.Argument(metavar="RUN]", help="The run to compare it with.", show_default=False)
    ] = None,
    *,
    env: Env = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Find where two runs part, by computing the steps in question again in one process.

    A cause that repeats is named: configuration, code, data, libraries, CPU. A run that its own replay contradicts has computed
    wrongly itself. The exit status is 0 if both recorded the same bits, and 1 if they part.
    """
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.lab.bisect import SAME
    from ttlaunch.lab.bisect import bisect as find_parting
    from ttlaunch.lab.replay import prepare_replay
    from ttlaunch.lab.repro import read_origin_of

    dialogue = TerminalDialogue(form, verbose=verbose)
    origins = [read_origin_of(path) for path in _folders_of(left, right, runs_dir=runs_dir)]
    first = prepare_replay(origins[0], dialogue, env=env or ())
    is_itself = origins[0].folder == origins[1].folder  # then everything is known, and warned of, already
    second = first if is_itself else prepare_replay(origins[1], dialogue, env=env or ())
    found = find_parting(first, second)
    if form is Format.JSON:
        print_json(asdict(found), schema="bisect")
    elif form is Format.CONCISE:
        parting = found.parting
        where = () if parting is None else (parting.what, parting.name or "", str(parting.micro_batch))
        print_lines([tabbed((found.verdict, f"step {_step_of(found)}", *where))])
    else:
        print_lines(_lines(found))
    exit_with(contract.STATUS_DONE if found.verdict == SAME else contract.STATUS_RANK_FAILED)


def _folders_of(left: str | None, right: str | None, *, runs_dir: Path) -> list[Path]:
    """Return the folders of two runs, by default of the two newest ones.

    Raises:
        LaunchError: There are no such runs, or only one is named.
    """
    if left is not None and right is not None:
        return [find_named_run(name, runs_dir=runs_dir) for name in (left, right)]
    if left is not None:
        raise usage_error("`bisect` compares two runs, and one is named", f"`ttlaunch bisect {shown(left)} latest`")
    newest = run_folders(Path.cwd() / runs_dir)[-2:]
    if len(newest) < 2:  # noqa: PLR2004
        message = f"{shown(runs_dir, longest=_LONGEST)} has {counted(len(newest), 'run')}, and `bisect` compares two"
        raise usage_error(message, "`--runs-dir DIR` names the folder of runs")
    return newest


def _step_of(found: "Bisection") -> int | None:
    return found.parting.step if found.parting is not None else found.first_different


def _lines(found: "Bisection") -> Iterator[str]:
    from ttlaunch.lab.bisect import HARDWARE, LAYOUT, SAME, UNKNOWN

    yield f"{found.runs[0]} and {found.runs[1]}"
    if found.verdict == SAME:
        until = "" if found.last_equal is None else f"; the last digests are those of step {found.last_equal}"
        yield f"  the same bits, as far as both recorded them{until}"
    else:
        equal = "none before" if found.last_equal is None else f"equal after step {found.last_equal}"
        yield f"  recorded         {equal}, different in step {found.first_different}"
    for one in found.contradictions:
        yield from _contradiction_lines(one)
    if found.parting is not None:
        yield from _parting_lines(found.parting)
    for cause in found.causes:
        yield f"  {'also different' if cause.kind == LAYOUT else 'differs':<16} {cause.kind}: {cause.text}"
    if found.verdict == HARDWARE:
        yield "  cause            hardware: the run does not repeat its own bits, with the same libraries and instructions"
    elif found.verdict == UNKNOWN:
        many = "several differences can be the cause" if found.causes else "nothing that runs record differs"
        yield f"  cause            unknown: {many}"
    elif found.verdict != SAME:
        yield f"  cause            {found.verdict}"


def _contradiction_lines(one: "Contradiction") -> Iterator[str]:
    ranks = f", rank {', '.join(map(str, one.ranks))}" if one.ranks else ""
    yield f"  contradicted     {one.run}{ranks}: its replay has its bits after step {one.after}, and others in step {one.step}"
    if one.tensors:
        yield f"                   {_named(one.tensors)}"


def _parting_lines(parting: "Parting") -> Iterator[str]:
    places = {
        "weights": "the weights before the first step",
        "inputs": "the inputs and targets",
        "activation": f"what {parting.name} makes",
        "gradient": f"the gradient of {parting.name}",
        "gradients": f"the gradient of {parting.name} in the update, although those of all micro-batches are equal",
        "update": f"the update of {parting.name}, although its gradients are equal",
    }
    of = "" if parting.micro_batch is None else f" of micro-batch {parting.micro_batch}"
    yield f"  first difference step {parting.step}: {places[parting.what]}{of}"
    if parting.tensors and parting.what != "weights":
        yield f"  after the step   {_named(parting.tensors)}"


def _named(tensors: "tuple[str, ...]") -> str:
    names = [f"`{shown(name)}`" for name in tensors[:_MOST_NAMED]]
    more = len(tensors) - len(names)
    others = [f"{more} more"] if more else []
    return f"{counted(len(tensors), 'tensor')}: {listed([*names, *others], last='and', quote='')}"
