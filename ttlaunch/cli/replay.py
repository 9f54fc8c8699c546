"""`ttlaunch replay`: compute one step of a recorded run again, and show everything that was in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.named_run import find_named_run
from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics, tabbed
from ttlaunch.cli.options import Env, NamedRun, OutputFormat, RunsDir, Verbose
from ttlaunch.diagnostics import Format, counted, shown, usage_error

if TYPE_CHECKING:
    from ttlaunch.lab.replay import Replay
    from ttlaunch.records.replay import ShownRank, TensorFacts

EXAMPLES = """\
[bold]ttlaunch replay latest[/bold]   the last step of the newest run; of a failed run, the step that failed

[bold]ttlaunch replay 3fa1 --step 340[/bold]   gradients, activations and texts of a step, and whether its bits are those of the run

[bold]ttlaunch replay 3fa1 --step 340 --rank 2 --micro-batch 5[/bold]   only those of one rank and one micro-batch

[bold]ttlaunch replay 3fa1 --step 340 --break trainer.py:78[/bold]   a debugger at a line of the recipe, with the other ranks simulated
"""
_LONGEST = 160
_MOST_LINES = 12
_OF_THE_RANK = ("gradients in the update", "after the update")


def replay(
    run: NamedRun = "latest",
    *,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, metavar="N", help="The step; by default the one that failed, or the last."),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, metavar="R", help="Show this rank only.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=0, metavar="I", help="Show this micro-batch only.")
    ] = None,
    break_at: Annotated[
        str | None,
        typer.Option("--break", metavar="FILE:LINE", help="Open Python's debugger before this line, in the step."),
    ] = None,
    env: Env = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Keep the records in this folder, which must not exist."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Compute one step of a run again, and compare it with what the run recorded.

    One process on this machine simulates all ranks, from the nearest checkpoint before the step, with the code that the run
    kept. The exit status is 1 if the bits are others than the run's.
    """
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.lab.replay import prepare_replay, replay_steps
    from ttlaunch.lab.replay_place import parse_place
    from ttlaunch.lab.repro import read_origin_of
    from ttlaunch.records.replay import ReplayOrder

    if out is not None and out.exists():
        raise usage_error(f"{shown(out, longest=_LONGEST)} already exists", "name another folder")
    if break_at is not None and form is not Format.FULL:
        raise usage_error("a debugger needs the terminal that `--format` is for", "leave `--format` out")
    dialogue = TerminalDialogue(form, verbose=verbose)
    origin = read_origin_of(find_named_run(run, runs_dir=runs_dir))
    prepared = prepare_replay(origin, dialogue, env=env or ())
    if rank is not None and rank >= prepared.ranks:
        ranks = counted(prepared.ranks, "rank")
        raise usage_error(f"{origin.run_id} has no rank {rank}", f"it is replayed with {ranks}; the first is 0")
    file, line = (None, None) if break_at is None else parse_place(break_at, prepared)
    order = ReplayOrder(
        step=prepared.last_step if step is None else step,
        shown=True,
        digests=False,
        file=file,
        line=line,
        rank=rank or 0,
    )
    found = replay_steps(prepared, order=order, keep=out)
    _check_micro_batch(found, micro_batch, rank=rank)
    _show(found, form, rank=rank, micro_batch=micro_batch)
    exit_with(contract.STATUS_RANK_FAILED if found.verdict in {"different", "failed"} else contract.STATUS_DONE)


def _check_micro_batch(found: "Replay", micro_batch: int | None, *, rank: int | None) -> None:
    """Refuse a micro-batch that the step does not have, or that another rank than `rank` computes.

    Raises:
        LaunchError: It has others.
    """
    shown_ranks = found.shown.ranks if found.shown is not None else ()
    ranks = {batch.index: one.rank for one in shown_ranks for batch in one.batches}
    if micro_batch is None or not ranks:
        return
    if micro_batch not in ranks:
        message = f"step {found.step} of {found.run} has no micro-batch {micro_batch}"
        raise usage_error(message, f"its micro-batches are {min(ranks)} to {max(ranks)}")
    own = [batch.index for one in shown_ranks if one.rank == rank for batch in one.batches]
    if rank is not None and micro_batch not in own:
        message = f"rank {rank} did not compute micro-batch {micro_batch} of step {found.step} of {found.run}"
        raise usage_error(message, f"`--rank {ranks[micro_batch]}` did")


def _show(found: "Replay", form: Format, *, rank: int | None, micro_batch: int | None) -> None:
    from ttlaunch.lab.replay import as_json, judged

    verdict = judged(found)
    if form is Format.JSON:
        content = as_json(found, rank=rank, micro_batch=micro_batch)
        print_json({**content, "diagnostics": [one.as_json() for one in verdict]}, schema="replay")
    elif form is Format.CONCISE:
        print_lines([tabbed((found.run, f"step {found.step}", found.verdict))])
    else:
        print_lines(_lines(found, rank=rank, micro_batch=micro_batch))
    show_diagnostics(verdict, form=form)


def _lines(found: "Replay", *, rank: int | None, micro_batch: int | None) -> Iterator[str]:
    began = f"the checkpoint of step {found.began}" if found.checkpoint else f"step {found.began}"
    steps = counted(found.step - found.began, "step")
    yield f"{found.run}, step {found.step}: {steps} from {began}, {found.duration_s:.1f} s"
    yield f"  {_proof(found)}"
    if found.ended is not None:
        yield f"  failed           {shown(found.ended, longest=_LONGEST)}"
    for name, by_rank in found.recorded.numbers.get(found.step, {}).items():
        values = dict.fromkeys(by_rank.values())
        yield f"  {name:<16} {', '.join(map(repr, values))}"
    if found.played.report.parameters_sha256 is not None:
        yield f"  parameters       sha256 {found.played.report.parameters_sha256}"
    yield from _not_finite_lines(found)
    if found.not_shown is not None:
        yield f"  not shown        {shown(found.not_shown, longest=_LONGEST)}; other tensors than those below are missing"
    ranks = [one for one in (found.shown.ranks if found.shown is not None else ()) if rank in {None, one.rank}]
    for one in ranks:
        yield from _rank_lines(one, micro_batch=micro_batch, has_tables=rank is not None)
    if ranks and rank is None:
        yield "`--rank R` shows activations, gradients and parameters; `--format json` all that was found"


def _not_finite_lines(found: "Replay") -> Iterator[str]:
    """Name the first layer that made a value that is NaN or infinite, and the sequences from which it made it."""
    from ttlaunch.records.replay import first_not_finite

    first = first_not_finite(found.shown.ranks) if found.shown is not None else None
    if first is None:
        return
    rank, bad = first
    which = "backward" if bad.is_backward else "forward"
    yield f"  first not finite rank {rank.rank} ({rank.role}), micro-batch {bad.micro_batch}: the {which} pass of {shown(bad.layer)}"
    yield f"                   made {bad.nans} NaN and {counted(bad.infs, 'infinite value')} of"
    for batch in rank.batches:
        if batch.index == bad.micro_batch:
            for text in batch.texts:
                yield f"    {shown(text, longest=_LONGEST)}"


def _proof(found: "Replay") -> str:
    tensors = found.agreement.tensors.get(found.step, 0)
    if found.verdict == "different":
        return "not the bits of the run"
    if found.verdict == "failed":
        return "it failed, so nothing is proven"
    if found.verdict == "equal":
        return f"the bits of the run: {counted(tensors, 'digest')} of this step equal"
    if found.verdict == "unknown":
        return "nothing that the run recorded can be compared"
    numbers = counted(sum(found.agreement.numbers.values()), "number")
    proven = found.agreement.last_proven
    since = "" if proven is None else f"; digests of step {proven} equal"
    return f"the run has no digests of this step: {numbers} on the way equal{since}"


def _rank_lines(one: "ShownRank", *, micro_batch: int | None, has_tables: bool) -> Iterator[str]:
    yield f"rank {one.rank} ({one.role}){'' if one.is_complete else ', which did not come to the end of the step'}"
    for batch in one.batches:
        if micro_batch in {None, batch.index}:
            shape = " × ".join(map(str, batch.shape))
            yield f"  micro-batch {batch.index}, {shape}, sha256 {batch.inputs_sha256[:12]}"
            for text in batch.texts:
                yield f"    {shown(text, longest=_LONGEST)}"
    for title, rows in _tensors(one, micro_batch=micro_batch):
        odd = [row for row in rows if row[1].nans or row[1].infs]
        others = [row for row in rows if row not in odd] if has_tables else []
        whole = has_tables and (micro_batch is not None or title in _OF_THE_RANK)
        yield from _table(title, [*odd, *others], most=None if whole else _MOST_LINES)


def _tensors(one: "ShownRank", *, micro_batch: int | None) -> "Iterator[tuple[str, list[tuple[str, TensorFacts]]]]":
    for title, passes in (("activations", one.activations), ("gradients of micro-batches", one.micro_gradients)):
        yield (
            title,
            [
                (f"{each.micro_batch} {each.name}", each.facts)
                for each in passes
                if micro_batch in {None, each.micro_batch}
            ],
        )
    if micro_batch is None:
        for title, named in zip(_OF_THE_RANK, (one.gradients, one.tensors), strict=True):
            yield title, [(each.name, each.facts) for each in named]


def _table(title: str, rows: "list[tuple[str, TensorFacts]]", *, most: int | None) -> Iterator[str]:
    """Show a line for each tensor, up to `most`; those with NaN or infinite values come first."""
    if not rows:
        return
    chosen = rows[:most]
    yield f"  {title:<42} {'norm':<12} {'least to greatest':<24} how many values in each tenth of that"
    for name, facts in chosen:
        strange = f", {facts.nans} NaN, {facts.infs} infinite" if facts.nans or facts.infs else ""
        bounds = f"{facts.lowest:.4g} to {facts.highest:.4g}"
        parts = " ".join(map(str, facts.histogram))
        yield f"    {shown(name):<40} {facts.norm:<12.6g} {bounds:<24} {parts}{strange}"
    if len(chosen) < len(rows):
        yield f"    … and {len(rows) - len(chosen)} more; `--micro-batch`, or `--format json`, shows all"
