"""`ttlaunch verify`: compute a checkpoint, or the text of a receipt, again, and say whether it is the same."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ttlaunch import contract
from ttlaunch.cli.console import exit_with, print_json, print_lines, show_diagnostics, tabbed
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import Env, OutputFormat, Overrides, RunsDir, Verbose
from ttlaunch.diagnostics import Format, counted, shown, usage_error

if TYPE_CHECKING:
    from ttlaunch.app.verify import Verdict
    from ttlaunch.lab.verify_checkpoint import Interval, Verified
    from ttlaunch.serving.receipt import Receipt

EXAMPLES = """\
[bold]ttlaunch verify latest[/bold]   compute the newest checkpoint again from the one before it, and check its chain

[bold]ttlaunch verify 3fa1 --from-start[/bold]   compute the whole training again that led to the newest checkpoint of a run

[bold]ttlaunch verify runs/3fa1/checkpoints/step-20[/bold]   a checkpoint by its folder

[bold]ttlaunch generate latest "def main(" --receipt said.json[/bold]   continue a text, and write its receipt

[bold]ttlaunch verify said.json --run 3fa1[/bold]   compute the text again with the weights of a run

[bold]ttlaunch verify said.json --ranks 2[/bold]   the same on two ranks: the tokens do not depend on it

[bold]ttlaunch verify private.json --prompt prompt.txt[/bold]   check a receipt that has only the hash of its prompt
"""
_LONGEST = 120
_SHORT = 12


def verify(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECEIPT|RUN|CHECKPOINT|latest", help="A receipt's file, a run, or a checkpoint's folder."
        ),
    ],
    *,
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start",
            help="Of a checkpoint: compute all of its training again, not only the steps since the last one.",
        ),
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="latest|RUN|PATH",
            help="The run or checkpoint that has a receipt's weights, by default the newest; or the run that has made the checkpoint.",
        ),
    ] = None,
    prompt: Annotated[
        Path | None, typer.Option("--prompt", metavar="FILE", help="The prompt's text, which a private receipt lacks.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, metavar="N", help="Ranks that share the model of a receipt; by default 1."),
    ] = None,
    split: Annotated[
        Literal["stages", "columns"] | None,
        typer.Option("--split", help="What each rank has: blocks, or columns of matrices; by default blocks."),
    ] = None,
    overrides: Overrides = None,
    env: Env = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Compute a checkpoint or the text of a receipt again, and say whether it is equal or where it differs.

    The exit status is 0 if all is equal, and 1 if not. A checkpoint is computed again in one process, from the one before it, with
    the code that its run kept, and its chain of predecessors is checked. Of a receipt nothing is opened or started: you name the
    weights, and they must have the hash in it. A receipt is no signature: anybody can write one.
    """
    dialogue = TerminalDialogue(form, verbose=verbose)
    if os.path.isfile(what) or what.endswith(".json"):  # noqa: PTH113 - never raises
        _refuse({"--from-start": from_start, "--env": env}, "a receipt", "a checkpoint")
        how = {"ranks": ranks or 1, "split": split or "stages", "overrides": tuple(overrides or ())}
        _verify_receipt(Path(what), dialogue, form, run=run or "latest", prompt=prompt, how=how, runs_dir=runs_dir)
        return
    _refuse({"--prompt": prompt, "--ranks": ranks, "--split": split, "--set": overrides}, "a checkpoint", "a receipt")
    _verify_checkpoint(what, dialogue, form, run=run, from_start=from_start, env=env or (), runs_dir=runs_dir)


def _refuse(options: Mapping[str, object], given: str, other: str) -> None:
    """Refuse options that are for the other kind of thing to verify.

    Raises:
        LaunchError: One is given.
    """
    wrong = next((name for name, value in options.items() if value), None)
    if wrong is not None:
        raise usage_error(f"`{wrong}` is for {other}, and this is {given}", "leave it out")


def _verify_checkpoint(
    where: str,
    dialogue: TerminalDialogue,
    form: Format,
    *,
    run: str | None,
    from_start: bool,
    env: Sequence[str],
    runs_dir: Path,
) -> None:
    from ttlaunch.lab.verify_checkpoint import EQUAL, as_json, judged, verify_checkpoint

    found = verify_checkpoint(
        where, dialogue, runs_dir=runs_dir, working_folder=Path.cwd(), run=run, from_start=from_start, env=env
    )
    wrong = judged(found)
    if form is Format.JSON:
        content = {**as_json(found), "diagnostics": [one.as_json() for one in wrong]}
        print_json(content, schema="verify-checkpoint")
    elif form is Format.CONCISE:
        print_lines([tabbed((found.run or "", f"step {found.step}", found.verdict))])
    else:
        print_lines(_lines_of_checkpoint(found))
    show_diagnostics(wrong, form=form)
    exit_with(contract.STATUS_DONE if found.verdict == EQUAL else contract.STATUS_RANK_FAILED)


def _lines_of_checkpoint(found: "Verified") -> Iterator[str]:
    from ttlaunch.lab.verify_checkpoint import EQUAL, UNKNOWN

    words = {EQUAL: "equal", UNKNOWN: "not computed again" if not found.intervals else "nothing could be compared"}
    yield f"{shown(found.path, longest=_LONGEST)}: {words.get(found.verdict, found.verdict)}"
    for one in found.intervals:
        steps = f"step {one.step}" if one.step == one.began + 1 else f"steps {one.began + 1} to {one.step}"
        start = f"from the checkpoint of step {one.began}" if one.checkpoint else "from the beginning"
        yield f"  computed again   {steps} of {one.run} {start}, {one.replay.duration_s:.1f} s"
        yield f"  compared         {_compared(one)}"
    yield f"  chain            {_chain(found)}"
    for note in found.notes:
        yield f"  note: {note}"
    if found.verdict == EQUAL and found.began:
        yield f"  proven from step {found.began} on; `--from-start` computes all of the training again"


def _compared(one: "Interval") -> str:
    agreement = one.replay.agreement
    digests = counted(sum(agreement.tensors.values()), "digest")
    numbers = counted(sum(agreement.numbers.values()), "number")
    if one.compared:
        return f"all bytes of {counted(one.compared, 'tensor')}; {digests} and {numbers} on the way"
    return f"{digests} and {numbers} on the way; not the bytes of the file, which the ttlaunch of the run could not write again"


def _chain(found: "Verified") -> str:
    if found.chain is None:
        return "–" if found.chain_state == "absent" else found.chain_state
    links = counted(len(found.chain.links) + found.chain.left_out, "checkpoint")
    runs = counted(len({one.run for one in found.chain.links}), "run")
    return f"{found.chain_state}: {links} of {runs}, sha256 {found.chain.sha256[:_SHORT]}"


def _verify_receipt(
    path: Path,
    dialogue: TerminalDialogue,
    form: Format,
    *,
    run: str,
    prompt: Path | None,
    how: Mapping[str, Any],
    runs_dir: Path,
) -> None:
    from ttlaunch.app.ask_head import serving
    from ttlaunch.app.serve import ServeOptions
    from ttlaunch.app.verify import check_prompt, compute_again, find_weights, load_receipt, read_prompt

    given = load_receipt(path)
    text = None if prompt is None else read_prompt(prompt)
    options = ServeOptions(until_left=True, **how)
    spec, found = find_weights(given, run, options, runs_dir=runs_dir, working_folder=Path.cwd())
    check_prompt(given, text, where=run)
    dialogue.warn(found)
    with serving(spec, dialogue) as head:
        verdict = compute_again(given, head, prompt=text)
    if form is Format.JSON:
        print_json(_values(given, verdict), schema="verify")
    else:
        print_lines(_concise(verdict) if form is Format.CONCISE else _lines(given, verdict))
    exit_with(contract.STATUS_DONE if verdict.difference is None else contract.STATUS_RANK_FAILED)


def _values(receipt: "Receipt", verdict: "Verdict") -> dict[str, object]:
    from ttlaunch.app.verify import NO_SIGNATURE

    difference = verdict.difference
    return {
        "equal": difference is None,
        "difference": difference and {"message": difference.message, "token": difference.token},
        "model": verdict.hello.model,
        "step": verdict.hello.step,
        "weights_sha256": verdict.hello.weights_sha256,
        "provenance_sha256": verdict.hello.provenance_sha256,
        "exact": verdict.hello.exact,
        "why_not_exact": verdict.hello.why_not_exact,
        "conditions": {name: {"receipt": theirs, "here": ours} for name, (theirs, ours) in verdict.conditions.items()},
        "private": receipt.prompt_tokens is None,
        "text": verdict.text,
        "tokens": list(verdict.tokens),
        "note": NO_SIGNATURE,
    }


def _lines(receipt: "Receipt", verdict: "Verdict") -> Iterator[str]:
    from ttlaunch.app.verify import NO_SIGNATURE

    hello = verdict.hello
    if verdict.difference is None:
        ended = "" if receipt.finish_reason in {"cancelled", "error"} else f", and its end (`{receipt.finish_reason}`)"
        yield f"equal: {counted(len(receipt.tokens), 'token')}{ended}"
    else:
        yield f"different: {verdict.difference.message}"
    yield f"  computed with {hello.model}, step {hello.step}, weights {hello.weights_sha256[:12]}"
    if receipt.provenance_sha256 is not None and receipt.provenance_sha256 == hello.provenance_sha256:
        yield f"  provenance {receipt.provenance_sha256[:_SHORT]}: `ttlaunch verify CHECKPOINT` computes the weights again, too"
    for name, (theirs, ours) in verdict.conditions.items():
        yield f"  {name}: {_value(theirs)} in the receipt, {_value(ours)} here"
    if verdict.difference is not None and not verdict.conditions:
        yield "  the receipt names the same conditions as here, so it was changed, or is not from these weights"
    if not hello.exact:
        yield f"  this run does not have the bits of training: {shown(hello.why_not_exact or '', longest=_LONGEST)}"
    yield f"  note: {NO_SIGNATURE}"


def _concise(verdict: "Verdict") -> Iterator[str]:
    difference = verdict.difference
    yield tabbed(("equal",) if difference is None else ("different", difference.message))
    for name, (theirs, ours) in verdict.conditions.items():
        yield tabbed((name, _value(theirs), _value(ours)))


def _value(value: object) -> str:
    return shown(value, longest=_LONGEST)
