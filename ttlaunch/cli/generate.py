"""`ttlaunch generate`: continue a text with the model of a run."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ttlaunch import contract
from ttlaunch.cli.console import exit_with, print_json, print_lines, print_piece, write_file
from ttlaunch.cli.dialogue import TerminalDialogue
from ttlaunch.cli.options import Exact, MaxContext, On, OutputFormat, Overrides, RunsDir, SharingRanks, Verbose
from ttlaunch.diagnostics import Format, shown, usage_error

if TYPE_CHECKING:
    from ttlaunch.serving import wire

EXAMPLES = """\
[bold]ttlaunch generate latest "def main("[/bold]   continue a text with the newest checkpoint of all runs

[bold]ttlaunch generate latest "import " --temperature 0[/bold]   always the likeliest token

[bold]ttlaunch generate latest "import " -n 3 --seed 7[/bold]   three texts, the same ones every time

[bold]ttlaunch generate latest "class " --ranks 2[/bold]   with the model's blocks on two ranks; the tokens are the same

[bold]ttlaunch generate latest "def main(" --receipt said.json[/bold]   write what `ttlaunch verify` needs to compute the text again
"""
_MOST_TOKENS = 1 << 17
"""What is asked for unless a number is given: the text ends with the model's context."""


def generate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="latest|RUN|PATH|FOLDER", help="A run, one of its checkpoints, or a folder of transformers."
        ),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text to continue; `-` reads standard input.")],
    *,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, metavar="N", help="Most tokens to generate; unless given, as many as fit."),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=100.0, help="0: always the likeliest token.")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="Only the likeliest tokens with this probability in all.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, metavar="N", help="Only so many of the likeliest tokens; 0: all.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, metavar="N", help="Equal seeds give equal texts; drawn unless given.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, max=8, metavar="N", help="How many texts to generate.")] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End before this text. Repeatable, up to 4 times."),
    ] = None,
    ranks: SharingRanks = 1,
    split: Annotated[
        Literal["stages", "columns"],
        typer.Option("--split", help="What each rank has: blocks, or columns of matrices."),
    ] = "stages",
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="FILE", help="Write what `ttlaunch verify` needs to compute the text again."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Keep only the hash of the prompt in the receipt.")
    ] = False,
    max_context: MaxContext = None,
    exact: Exact = "auto",
    on: On = "local",
    overrides: Overrides = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Continue a text with the model of a run, as it was trained, or with one that transformers saved.

    The model computes the same logits as in training, to the bit, so equal seeds give equal texts with any number of ranks.
    """
    from ttlaunch.app.ask_head import serving
    from ttlaunch.app.serve import ServeOptions, check_prompt, find_served

    dialogue = TerminalDialogue(form, verbose=verbose)
    prompt = _prompt(text)
    _check_receipt(receipt, private=private, number=number)
    settings = {
        "text": prompt,
        "max_tokens": max_tokens or _MOST_TOKENS,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    asks = [_ask(settings, choice=choice) for choice in range(number)]
    how = ServeOptions(
        on=on,
        ranks=ranks,
        split=split,
        max_context=max_context,
        exact=exact,
        until_left=True,
        overrides=tuple(overrides or ()),
    )
    spec, found = find_served(run, how, runs_dir=runs_dir, working_folder=Path.cwd())
    dialogue.warn(found)
    check_prompt(spec, prompt)
    with serving(spec, dialogue) as head:
        texts = _Texts(form, prompt, asks)
        for message in head.answers(asks):
            texts.take(message)
        texts.finish(head.hello)
        if receipt is not None:
            write_file(receipt, texts.receipt(head.hello, private=private).encode(), force=False)
    exit_with(contract.STATUS_DONE)


def _prompt(text: str) -> str:
    """Return the text to continue; that of standard input for `-`.

    Raises:
        LaunchError: It is no text, or too long.
    """
    if text != "-":
        return text
    from ttlaunch.app.verify import decode_prompt
    from ttlaunch.serving.wire import LONGEST_FRAME

    return decode_prompt(sys.stdin.buffer.read(LONGEST_FRAME + 1), name="standard input")


def _ask(settings: Mapping[str, Any], *, choice: int) -> "wire.Ask":
    """Make an ask of what was typed.

    Raises:
        LaunchError: A value breaks a rule.
    """
    from ttlaunch.serving import wire
    from ttlaunch.serving.checked import UnfitError, build

    try:
        return build(wire.Ask, {**settings, "stream": choice + 1, "choice": choice})
    except UnfitError as unfit:
        name = unfit.path.partition("[")[0]
        raise usage_error(f"{'TEXT' if name == 'text' else f'`--{name}`'.replace('_', '-')}: {unfit.rule}") from unfit


def _check_receipt(receipt: Path | None, *, private: bool, number: int) -> None:
    """Check, before anything starts, that a receipt can be written.

    Raises:
        LaunchError: It cannot.
    """
    if receipt is None and private:
        raise usage_error("`--private` is about receipts, and none was asked for", "`--receipt FILE` writes one")
    if receipt is not None and number > 1:
        message = f"`--receipt` writes the receipt of one text, and `-n {number}` asks for {number}"
        raise usage_error(message, "leave `-n` out")
    if receipt is not None and receipt.exists():
        raise usage_error(f"{shown(receipt)} already exists", "name another file for the receipt")
    if receipt is not None and not os.access(receipt.parent, os.W_OK | os.X_OK):
        raise usage_error(
            f"no file can be made in {shown(receipt.parent)}", "name a folder that is there and can be written"
        )


class _Texts:
    """Prints texts: a single one as it comes, several when all have ended."""

    def __init__(self, form: Format, prompt: str, asks: "Sequence[wire.Ask]") -> None:
        number = len(asks)
        self._form, self._prompt, self._asks = form, prompt, asks
        self._accepted: list[wire.Accepted] = []
        self._seeds, self._texts = [0] * number, [""] * number
        self._ids: list[list[int]] = [[] for _ in range(number)]
        self._reasons = [""] * number
        self._is_streamed = form is not Format.JSON and number == 1

    def take(self, message: Any) -> None:
        """Note what the head says, and print it if it is the only text."""
        from ttlaunch.serving import wire

        place = message.stream - 1
        if isinstance(message, wire.Accepted):
            self._accepted.append(message)
            self._seeds[place] = message.seed
            if self._is_streamed:
                print_piece(self._prompt)
        elif isinstance(message, wire.Tokens):
            self._texts[place] += message.text
            if self._is_streamed:
                print_piece(message.text)
            self._ids[place] += message.ids
        else:
            self._reasons[place] = message.reason

    def receipt(self, hello: "wire.Hello", *, private: bool) -> str:
        """Return the text of the only text's receipt."""
        from ttlaunch.serving.receipt import make_receipt, render_receipt

        ids, reason = self._ids[0], self._reasons[0]
        made = make_receipt(hello, self._asks[0], self._accepted[0], tokens=ids, reason=reason, private=private)
        return render_receipt(made)

    def finish(self, hello: "wire.Hello") -> None:
        """Print what has not been printed yet."""
        if self._form is Format.JSON:
            rows = zip(self._texts, self._ids, self._seeds, self._reasons, strict=True)
            choices = [
                {"text": text, "tokens": ids, "seed": seed, "finish_reason": reason} for text, ids, seed, reason in rows
            ]
            about = {"model": hello.model, "weights_sha256": hello.weights_sha256, "exact": hello.exact}
            print_json({**about, "choices": choices}, schema="generate")
            return
        if self._is_streamed:
            print_piece("\n")
            return
        for text in self._texts:
            print_lines((self._prompt + text).split("\n"))
