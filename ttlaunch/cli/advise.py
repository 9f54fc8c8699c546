"""`ttlaunch advise`: which recipe and layout would train fastest on a cluster, within its memory, and why."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import can_redraw, print_json, print_lines, print_progress, tabbed
from ttlaunch.cli.options import OutputFormat, Verbose, asks_for, complete_recipes
from ttlaunch.cli.virtual_options import ComputeMs, LinkGbps, LinkUs, Slow, SlowLink
from ttlaunch.diagnostics import Format

if TYPE_CHECKING:
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.lab.advise import Ranking

_SAY_AFTER_S, _SAY_AGAIN_S = 1.0, 5.0

EXAMPLES = """\
[bold]ttlaunch advise --on lab -c train.yaml[/bold]   every recipe that trains this, the quickest first, and why

[bold]ttlaunch advise --on lab -c train.yaml --fits 24GB --link-gbps 1[/bold]   on hosts with 24 GB and slow links

[bold]ttlaunch advise zero --top 3[/bold]   the training of a recipe's own file, on this machine
"""


@asks_for("on", "config_file", "overrides", "ranks", "hostfile", "rank_bindings")
def advise(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="The recipe that the training file is written for. Default: the first one that knows its sections.",
            autocompletion=complete_recipes,
            show_default=False,
        ),
    ] = None,
    *,
    spec: RunSpec,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, metavar="N", help="How many to show.")] = 5,
    fits: Annotated[
        list[str] | None,
        typer.Option(
            "--fits",
            metavar="[HOST=]SIZE",
            help="The memory of each host, or of one, such as 24GB; ranks of a host share it. Repeatable.",
        ),
    ] = None,
    same_bits: Annotated[
        bool, typer.Option("--same-bits", help="Only forms that end with the bits of the training as it is.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure here how long a micro-batch takes, for up to 10 s, unless it is kept."
        ),
    ] = False,
    compute_ms: ComputeMs = None,
    link_us: LinkUs = None,
    link_gbps: LinkGbps = None,
    slow: Slow = None,
    slow_link: SlowLink = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Rank all recipes and layouts that train the same on a cluster by the predicted time of a step, and say why.

    Every form is simulated on a virtual clock, as by `simulate --virtual`; nothing is started on the cluster.
    """
    from ttlaunch.cli.advice_view import parse_fits
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.cli.virtual_view import parse_slow
    from ttlaunch.diagnostics import usage_error
    from ttlaunch.lab.advise import advise as rank_forms
    from ttlaunch.lab.advise import measured_ms
    from ttlaunch.lab.virtual import Conditions

    if calibrate and compute_ms is not None:
        raise usage_error("`--compute-ms` and `--calibrate` were given together", "leave one of them out")
    limits = parse_fits(fits or ())
    dialogue = TerminalDialogue(form, verbose=verbose)
    spec = replace(spec, target=target)
    if calibrate:
        dialogue.waiting("calibrating: measuring a micro-batch on this machine, for up to 10 s, unless it is kept")
    given: dict[str, Any] = {"compute_ms": measured_ms(spec, dialogue) if calibrate else compute_ms}
    given |= {"link_us": link_us, "link_gbps": link_gbps}
    conditions = Conditions(
        **{name: value for name, value in given.items() if value is not None},
        slow=parse_slow(slow or (), option="--slow"),
        slow_link=parse_slow(slow_link or (), option="--slow-link"),
    )
    try:
        found = rank_forms(
            spec,
            conditions,
            dialogue,
            top=top,
            limits=limits or None,
            only_same_bits=same_bits,
            done=_Progress(dialogue),
        )
    finally:
        print_progress("")
    _show(found, form, top=top, diagnostics=dialogue.warnings_as_json())


class _Progress:
    """Says how far the comparison is: on a terminal in its last line, elsewhere in a line after a second and then every few seconds."""

    def __init__(self, dialogue: "TerminalDialogue") -> None:
        self._dialogue = dialogue
        self._next = time.monotonic() + _SAY_AFTER_S

    def __call__(self, what: str, count: int, of: int) -> None:
        text = f"{what}: {count} of {of}"
        print_progress(text)
        if not can_redraw(sys.stderr) and time.monotonic() >= self._next:
            self._next = time.monotonic() + _SAY_AGAIN_S
            self._dialogue.waiting(text)


def _show(found: "Ranking", form: Format, *, top: int, diagnostics: Sequence[Mapping[str, Any]]) -> None:
    from ttlaunch.cli.advice_view import advice_line, render_ranking

    if form is Format.JSON:
        print_json({**found.as_json(), "diagnostics": list(diagnostics)}, schema="advise")
    elif form is Format.CONCISE:
        print_lines(tabbed(advice_line(place, one)) for place, one in enumerate(found.ranked[:top], start=1))
    else:
        print_lines(render_ranking(found, top=top))
