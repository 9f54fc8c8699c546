"""`ttlaunch verify`: compute the text of a receipt again, and say whether it is the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ttlaunch import contract
from ttlaunch.cli.console import exit_with, print_json, print_lines, tabbed
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import OutputFormat, Overrides, RunsDir, SharingRanks, Verbose
from ttlaunch.diagnostics import Format, counted, shown

if TYPE_CHECKING:
    from ttlaunch.app.verify import Verdict
    from ttlaunch.serving.receipt import Receipt

EXAMPLES = """\
[bold]ttlaunch generate latest "def main(" --receipt said.json[/bold]   continue a text, and write its receipt

[bold]ttlaunch verify said.json --run 3fa1[/bold]   compute the text again with the weights of a run

[bold]ttlaunch verify said.json --ranks 2[/bold]   the same on two ranks: the tokens do not depend on it

[bold]ttlaunch verify private.json --prompt prompt.txt[/bold]   check a receipt that has only the hash of its prompt
"""
_LONGEST = 120


def verify(
    receipt: Annotated[Path, typer.Argument(metavar="RECEIPT", help="The receipt's file.")],
    *,
    run: Annotated[
        str, typer.Option("--run", metavar="latest|RUN|PATH", help="The run or checkpoint that has the weights.")
    ] = "latest",
    prompt: Annotated[
        Path | None, typer.Option("--prompt", metavar="FILE", help="The prompt's text, which a private receipt lacks.")
    ] = None,
    ranks: SharingRanks = 1,
    split: Annotated[
        Literal["stages", "columns"],
        typer.Option("--split", help="What each rank has: blocks, or columns of matrices."),
    ] = "stages",
    overrides: Overrides = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Compute the text of a receipt again, and say whether it is equal or where it differs.

    The exit status is 0 if all tokens are equal, and 1 if not. Nothing that the receipt says is opened or started: you name
    the weights, and they must have the hash in the receipt. A receipt is no signature: anybody can write one.
    """
    from ttlaunch.app.ask_head import serving
    from ttlaunch.app.serve import ServeOptions
    from ttlaunch.app.verify import check_prompt, compute_again, find_weights, load_receipt, read_prompt

    dialogue = TerminalDialogue(form, verbose=verbose)
    given = load_receipt(receipt)
    text = None if prompt is None else read_prompt(prompt)
    how = ServeOptions(ranks=ranks, split=split, until_left=True, overrides=tuple(overrides or ()))
    spec, found = find_weights(given, run, how, runs_dir=runs_dir, working_folder=Path.cwd())
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
