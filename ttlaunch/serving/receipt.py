"""Receipts: what a served text was computed from, so that anybody with the same weights can compute it again.

A receipt is a JSON file. Whoever checks one got it from a stranger, so it is parsed once, with bounds, and it names no path, no
host and no command: the weights to check it with are named by the user, and must have the hash in the receipt. A receipt is no
signature. Anybody can write one; only computing the text again shows that it is true. No torch.
"""

from __future__ import annotations  # the parser reads the annotations of a record as texts

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ttlaunch.records.parser import BadRecord, Count, Flag, Number, Tag, Word, load, parse, record
from ttlaunch.records.regular_files import open_regular
from ttlaunch.serving.wire import LONGEST_FRAME, MOST_CHOICES, MOST_STOPS, MOST_TOKENS, Accepted, Ask, Hello

FORMAT: Final = 1
"""The format's number, under the key `receipt`."""
LONGEST_RECEIPT: Final = 4 * LONGEST_FRAME
"""Most bytes of a receipt's file."""
REASONS: Final = ("stop", "length", "cancelled", "error")
"""Why a text ended; of a text that was `cancelled` or ended by an `error`, the tokens up to there are checked."""

_EARLY: Final = frozenset({"cancelled", "error"})

_OF_HELLO: Final = (
    *("model", "recipe", "step", "tokenizer_sha256", "template_sha256", "exact", "why_not_exact", "precision", "torch"),
    *("cpu", "threads", "context", "split", "ranks"),
)
_OF_ASK: Final = ("max_tokens", "temperature", "top_p", "top_k", "choice", "stop")
_LONGEST_STOP = 200
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_ID, _LARGEST_SEED = 2**31 - 1, 2**63 - 1


@record
class Receipt:
    """What a text was computed from, and its tokens; `read_receipt` has checked every value.

    Attributes:
        receipt: The format's number.
        prompt_tokens: None in a private receipt, which has only `prompt_sha256` and `prompt_count`.
        prompt_sha256: `hash_tokens` of the prompt. Short prompts can be guessed from it.
        seed: The seed that was used, also if it was drawn.
        provenance_sha256: The hash of the provenance of the checkpoint, as `ttlaunch weights show` prints it; None if it had none.
        choice: The index of this text among those for one prompt with one seed.
        finish_reason: One of `REASONS`.
        cpu: The class of the processor, not a name of the machine.
    """

    receipt: Count
    model: Word
    recipe: Word
    step: Count
    weights_sha256: Word
    tokenizer_sha256: Word
    template_sha256: Word
    exact: Flag
    why_not_exact: Word | None
    precision: Word
    torch: Word
    cpu: Word
    threads: Count
    context: Count
    split: Word
    ranks: Count
    prompt_tokens: tuple[Count, ...] | None
    prompt_sha256: Word
    prompt_count: Count
    max_tokens: Count
    temperature: Number
    top_p: Number
    top_k: Count
    seed: Tag
    choice: Count
    stop: tuple[Word, ...]
    tokens: tuple[Count, ...]
    tokens_sha256: Word
    finish_reason: Word
    provenance_sha256: Word | None = None


@dataclass(frozen=True)
class Difference:
    """Where a text that was computed again parts from the receipt's.

    Attributes:
        message: A clause that says it.
        token: The place of the first token that differs, from 0; None if only the ends differ.
    """

    message: str
    token: int | None


class BadReceiptError(ValueError):
    """A file that is no receipt, or one whose values do not fit together; the text says why, in one clause."""


def hash_tokens(ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids: of their decimal numbers, joined by commas.

    >>> hash_tokens([1, 20])[:12]  # printf 1,20 | sha256sum
    'cfed6daca7d9'
    """
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def make_receipt(
    hello: Hello, ask: Ask, accepted: Accepted, *, tokens: Sequence[int], reason: str, private: bool = False
) -> Receipt:
    """Make the receipt of a text.

    Args:
        hello: What the head said about itself when it accepted the stream.
        ask: What was asked, with the sampling settings.
        accepted: The head's answer, with the prompt's tokens and the seed.
        tokens: All tokens of the text, also those from before a restart.
        reason: Why it ended, one of `REASONS`.
        private: Keep only the hash and the number of the prompt's tokens.
    """
    prompt = accepted.prompt_tokens
    served = {name: getattr(hello, name) for name in _OF_HELLO}
    if hello.provenance_sha256 is not None:  # else left out, since older versions do not know the key
        served["provenance_sha256"] = hello.provenance_sha256
    settings = {name: getattr(ask, name) for name in _OF_ASK}
    settings["stop"] = tuple(text for text in ask.stop if text)  # an empty one ends no text
    return Receipt(
        receipt=FORMAT,
        **served,
        weights_sha256=accepted.weights_sha256,
        prompt_tokens=None if private else tuple(prompt),
        prompt_sha256=hash_tokens(prompt),
        prompt_count=len(prompt),
        **settings,
        seed=accepted.seed,
        tokens=tuple(tokens),
        tokens_sha256=hash_tokens(tokens),
        finish_reason=reason,
    )


def receipt_values(receipt: Receipt) -> dict[str, object]:
    """The receipt as the object of its JSON file, for an answer that contains it."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(receipt).items()}


def render_receipt(receipt: Receipt) -> str:
    """Return the text of a receipt's file: one key a line."""
    rows = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in receipt_values(receipt).items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def read_receipt(path: Path) -> Receipt:
    """Read a receipt that the user named.

    Raises:
        OSError: The file cannot be read, or is no regular file.
        BadReceiptError: It is no receipt.
    """
    with open_regular(path, follow=True) as file:
        content = b""
        while len(content) <= LONGEST_RECEIPT and (part := file.read(LONGEST_RECEIPT + 1 - len(content))):
            content += part
        size = os.fstat(file.fileno()).st_size
    if len(content) > LONGEST_RECEIPT:
        raise BadReceiptError(f"it has {max(size, len(content)):,} bytes, more than {LONGEST_RECEIPT // 2**20} MiB")
    return parse_receipt(content)


def parse_receipt(content: bytes) -> Receipt:
    """Parse the bytes of a receipt.

    Raises:
        BadReceiptError: They are no receipt.
    """
    values = load(content)
    if isinstance(values, BadRecord):
        raise BadReceiptError(values.reason)
    if isinstance(values, dict) and isinstance(number := values.get("receipt"), int) and number != FORMAT:
        raise BadReceiptError(f"it has format {number}, and this version of ttlaunch reads format {FORMAT}")
    receipt = parse(Receipt, values)
    if isinstance(receipt, BadRecord):
        raise BadReceiptError(receipt.reason)
    # A setting that this version does not know could have changed the text.
    if unknown := sorted(values.keys() - vars(receipt).keys()):
        raise BadReceiptError(f"`{unknown[0][:40]}` is no key of format {FORMAT}")
    if problem := next(_problems(receipt), None):
        raise BadReceiptError(problem)
    return receipt


def _problems(receipt: Receipt) -> Iterator[str]:
    """What the kinds of the fields do not check: ranges, and whether the values fit together."""
    for name in ("weights_sha256", "tokenizer_sha256", "template_sha256", "prompt_sha256", "tokens_sha256"):
        if not _SHA256.fullmatch(getattr(receipt, name)):
            yield f"`{name}` is {getattr(receipt, name)[:40]!r}, expected 64 hexadecimal digits"
    if receipt.provenance_sha256 is not None and not _SHA256.fullmatch(receipt.provenance_sha256):
        yield f"`provenance_sha256` is {receipt.provenance_sha256[:40]!r}, expected 64 hexadecimal digits"
    for name, least, most in (
        ("temperature", 0, 100),
        ("top_p", 0, 1),
        ("top_k", 0, _LARGEST_ID),
        ("seed", 0, _LARGEST_SEED),
        ("choice", 0, MOST_CHOICES - 1),
        ("max_tokens", 1, MOST_TOKENS),
        ("context", 1, MOST_TOKENS),
        ("prompt_count", 1, receipt.context),
    ):
        if not least <= (value := getattr(receipt, name)) <= most:  # nan is neither
            yield f"`{name}` is {value}, expected a number from {least} to {most}"
    if receipt.finish_reason not in REASONS:
        yield f"`finish_reason` is {receipt.finish_reason[:40]!r}, expected one of {', '.join(REASONS)}"
    if len(receipt.stop) > MOST_STOPS or any(not 0 < len(stop) <= _LONGEST_STOP for stop in receipt.stop):
        yield f"`stop` has to be at most {MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters"
    yield from _unfit_tokens(receipt)


def _unfit_tokens(receipt: Receipt) -> Iterator[str]:
    count = len(receipt.tokens)
    if count > receipt.max_tokens:
        yield f"it has {count} tokens where `max_tokens` is {receipt.max_tokens}"
    if receipt.prompt_count + count > receipt.context + 1:  # the last token of a text is never read again
        yield f"{receipt.prompt_count} tokens and {count} more do not fit into a context of {receipt.context}"
    if receipt.prompt_tokens is not None and len(receipt.prompt_tokens) != receipt.prompt_count:
        yield f"`prompt_count` is {receipt.prompt_count}, and `prompt_tokens` has {len(receipt.prompt_tokens)}"
    for name, ids in (("prompt", receipt.prompt_tokens), ("tokens", receipt.tokens)):
        if ids is not None and any(one > _LARGEST_ID for one in ids):
            yield f"a token of `{name}` is larger than {_LARGEST_ID}"
        if ids is not None and hash_tokens(ids) != getattr(receipt, f"{name}_sha256"):
            yield f"`{name}_sha256` is not the hash of its tokens, so one of the two was changed"


def ask_again(receipt: Receipt, *, stream: int, prompt: str | None = None) -> Ask:
    """Return what to ask of a head with the same weights to get the text of a receipt again.

    Args:
        receipt: The receipt.
        stream: The number of the stream on the wire.
        prompt: The text of a private receipt's prompt; the head's `Accepted` has its tokens, whose hash must be the receipt's.

    Raises:
        BadReceiptError: The receipt is private, and there is no prompt.
    """
    if receipt.prompt_tokens is None and prompt is None:
        raise BadReceiptError("it is private: it has only the hash of the prompt")
    ended_early = receipt.finish_reason in _EARLY
    return Ask(
        stream=stream,
        text=prompt if receipt.prompt_tokens is None else None,
        tokens=receipt.prompt_tokens,
        max_tokens=max(1, len(receipt.tokens)) if ended_early else receipt.max_tokens,
        temperature=float(receipt.temperature),
        top_p=float(receipt.top_p),
        top_k=receipt.top_k,
        seed=receipt.seed,
        choice=receipt.choice,
        stop=receipt.stop,
    )


def first_difference(receipt: Receipt, tokens: Sequence[int], *, reason: str) -> Difference | None:
    """Say where a text that was computed again parts from the receipt's; None if they are equal.

    Of a text that was cancelled or ended by an error, only its tokens are compared.
    """
    ended_early = receipt.finish_reason in _EARLY
    found = tuple(tokens)[: len(receipt.tokens)] if ended_early else tuple(tokens)
    for place, (theirs, ours) in enumerate(zip(receipt.tokens, found, strict=False)):
        if theirs != ours:
            return Difference(f"token {place} is {theirs} in the receipt and {ours} here", place)
    if len(found) != len(receipt.tokens):
        least = min(len(found), len(receipt.tokens))
        return Difference(f"the receipt has {len(receipt.tokens)} tokens, and here they are {len(found)}", least)
    if not ended_early and reason != receipt.finish_reason:
        return Difference(f"the text ended by `{receipt.finish_reason}` in the receipt and by `{reason}` here", None)
    return None


def other_conditions(receipt: Receipt, hello: Hello) -> Mapping[str, tuple[object, object]]:
    """What differs here from what the receipt says of its own computation: name to (receipt's, here).

    None of these changes a text of an exact run with the same weights, precision and context on a processor for which the rules hold;
    where a text differs, they are the first candidates.
    """
    names = ("precision", "context", "torch", "cpu", "threads", "exact", "tokenizer_sha256", "template_sha256", "step")
    pairs = {name: (getattr(receipt, name), getattr(hello, name)) for name in names}
    if receipt.provenance_sha256 is not None:
        pairs["provenance_sha256"] = receipt.provenance_sha256, hello.provenance_sha256
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
