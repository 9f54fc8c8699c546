"""Compute the text of a receipt again, with weights that the user names, and say whether it is the same.

Nothing that a receipt says is a path, a host or a command here: it says numbers, and hashes that are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ttlaunch.app.ask_head import Head
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.app.serve import ServeOptions, find_served, most_context, weights_served_by
from ttlaunch.diagnostics import Diagnostic, counted, file_error, shown, usage_error
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.serving import wire
from ttlaunch.serving.receipt import (
    BadReceiptError,
    Difference,
    Receipt,
    ask_again,
    first_difference,
    hash_tokens,
    other_conditions,
    read_receipt,
)

NO_SIGNATURE = "a receipt is no signature: anybody can write one, and this shows only what these weights compute"
_STREAM = 1
_LONGEST_PATH = 300
_SHORT = 12


@dataclass(frozen=True)
class Verdict:
    """What came of computing the text of a receipt again.

    Attributes:
        hello: What the head said of itself.
        difference: Where the text parts from the receipt's; None if they are equal.
        conditions: What is other here than the receipt says of its computation: name to (receipt's, here).
        text: The text as it was computed here.
        tokens: Its tokens.
    """

    hello: wire.Hello
    difference: Difference | None
    conditions: Mapping[str, tuple[object, object]]
    text: str
    tokens: tuple[int, ...]


def load_receipt(path: Path) -> Receipt:
    """Read the receipt that a user names.

    Raises:
        LaunchError: It cannot be read, or is no receipt.
    """
    try:
        return read_receipt(path)
    except OSError as error:
        raise file_error(path, error, verb="read") from error
    except BadReceiptError as error:
        message = f"{shown(path, longest=_LONGEST_PATH)} is no receipt: {error}"
        raise usage_error(message, "`ttlaunch generate … --receipt FILE` writes one") from error


def read_prompt(path: Path) -> str:
    """Read the prompt of a private receipt: the text as it was given, without a line break added.

    Raises:
        LaunchError: It cannot be read, is no UTF-8, or is longer than a prompt can be.
    """
    from ttlaunch.records.regular_files import open_regular

    try:
        with open_regular(path, follow=True) as file:
            content = file.read(wire.LONGEST_FRAME + 1)
    except OSError as error:
        raise file_error(path, error, verb="read") from error
    return decode_prompt(content, name=shown(path, longest=_LONGEST_PATH))


def decode_prompt(content: bytes, *, name: str) -> str:
    """Decode the bytes of a prompt.

    Raises:
        LaunchError: They are no UTF-8, or more than a prompt can have.
    """
    if len(content) > wire.LONGEST_FRAME:
        raise usage_error(f"{name} has more than {wire.LONGEST_FRAME} bytes, the most that a prompt can have")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        message = f"byte {error.start} of {name} is {content[error.start]:#04x}, which is no UTF-8"
        raise usage_error(message, "`iconv -t UTF-8` converts a text") from error


def find_weights(
    receipt: Receipt, where: str, options: ServeOptions, *, runs_dir: Path, working_folder: Path
) -> tuple[RunSpec, list[Diagnostic]]:
    """Find the weights of a receipt in a run or checkpoint that the user names, and return the run that serves them.

    Of a run, the newest checkpoint is looked at, and then the one of the receipt's step.

    Args:
        receipt: The receipt.
        where: `latest`, a run, or the path of a checkpoint.
        options: How it is served; the context is the receipt's.
        runs_dir: The folder of runs.
        working_folder: The folder to which relative paths are relative.

    Raises:
        LaunchError: There are no such weights there, or they cannot be served.
    """
    spec, found = find_served(where, options, runs_dir=runs_dir, working_folder=working_folder)
    newest = Path(spec.resume) if spec.resume else None
    of_step = newest and newest.with_name(f"step-{receipt.step}")
    if weights_served_by(spec) != receipt.weights_sha256 and of_step and of_step != newest and of_step.is_dir():
        where = str(of_step)
        spec, found = find_served(where, options, runs_dir=runs_dir, working_folder=working_folder)
    if (here := weights_served_by(spec)) != receipt.weights_sha256:
        message = (
            f"the receipt is for weights {receipt.weights_sha256[:_SHORT]}, and {shown(where, longest=_LONGEST_PATH)} has "
            f"{here[:_SHORT]}"
        )
        told = f"the receipt says that they are those of {shown(receipt.model)}, step {receipt.step}"
        raise usage_error(message, "`--run RUN|CHECKPOINT` names other weights", notes=(told,))
    if receipt.context > (trained := most_context(spec)):
        message = f"the receipt has a context of {receipt.context} tokens, and its weights were trained with {trained}"
        raise usage_error(message, "it was changed, or is not from these weights")
    options = replace(options, max_context=receipt.context)
    return find_served(where, options, runs_dir=runs_dir, working_folder=working_folder)[0], found


def check_prompt(receipt: Receipt, prompt: str | None, *, where: str) -> None:
    """Check, before anything starts, that the prompt is known.

    Raises:
        LaunchError: The receipt is private and no prompt was given, or the other way round.
    """
    if receipt.prompt_tokens is None and prompt is None:
        raise usage_error(
            "the receipt is private: it has only the hash of its prompt, so its text cannot be computed again",
            "`--prompt FILE` names a file with the prompt",
            notes=(
                f"its weights are those of {shown(where, longest=_LONGEST_PATH)}; that is all that can be checked without the prompt",
            ),
        )
    if receipt.prompt_tokens is not None and prompt is not None:
        raise usage_error("the receipt has its prompt, so `--prompt` names a second one", "leave `--prompt` out")


def compute_again(receipt: Receipt, head: Head, *, prompt: str | None = None) -> Verdict:
    """Ask a head with the receipt's weights for its text again.

    Args:
        receipt: The receipt.
        head: The head.
        prompt: The text of a private receipt's prompt.

    Raises:
        LaunchError: The prompt is not the receipt's, the head refuses it, or the run has ended.
    """
    ask = ask_again(receipt, stream=_STREAM, prompt=prompt)
    ids: list[int] = []
    text, reason = "", "error"
    for message in head.answers([ask]):
        if isinstance(message, wire.Accepted):
            _check_tokens(receipt, message.prompt_tokens)
        elif isinstance(message, wire.Tokens):
            ids += message.ids
            text += message.text
        else:
            reason = message.reason
    difference = first_difference(receipt, ids, reason=reason)
    return Verdict(head.hello, difference, other_conditions(receipt, head.hello), text, tuple(ids))


def _check_tokens(receipt: Receipt, tokens: Sequence[int]) -> None:
    """Check that a prompt given as a text is that of a private receipt.

    Raises:
        LaunchError: It is another one.
    """
    if hash_tokens(tokens) == receipt.prompt_sha256:
        return
    message = "the prompt is not the one of the receipt: its tokens have another hash"
    count = f"the prompt has {counted(len(tokens), 'token')}, and that of the receipt {receipt.prompt_count}"
    hint = "an editor may have added a line break at the end of the file"
    raise usage_error(message, hint, notes=(count,))
