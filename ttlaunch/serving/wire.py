"""The messages between the head of a serving run (rank 0) and what asks it: the HTTP door, or `ttlaunch generate`.

They travel over a Unix stream socket as frames: four bytes of length, big endian, then one JSON object with its `kind`. `Decoder` parses
each once, with bounds, and returns a frozen dataclass in which every value is valid; whatever breaks a rule raises `WireError`
with the name of the side that sent it. Streams are numbered by the side that asks: a positive number, never used twice.

No function here blocks or knows a clock, so that threads, event loops and ranks can all use it. Standard library only.
"""

import functools
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from ttlaunch.serving.checked import (
    UnfitError,
    build,
    decimal,
    list_of,
    named_numbers,
    named_texts,
    object_of,
    one_of,
    or_none,
    sha256,
    string,
    truth,
    whole,
)

LONGEST_FRAME: Final = 1 << 20
"""Most bytes of a frame's JSON."""
MOST_TOKENS: Final = 1 << 17
MOST_CHOICES: Final = 8
"""Most texts for one prompt: OpenAI's `n`."""
MOST_LOGPROBS: Final = 20
_LONGEST_TEMPLATE: Final = 1 << 18
MOST_STOPS: Final = 4
LEAST_LOGPROB: Final = -9999.0
"""What stands for the logarithm of a probability of zero."""

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """What the other side sent breaks the rules of these messages, or a message is too long to be sent."""


_SHORT: Final = 200
_MOST_RANKS: Final = 4096
_LONGEST_MESSAGE: Final = 4000
_stream = whole(1)
_tokens = list_of(whole(0, 2**31 - 1), MOST_TOKENS)
_seed = whole(0, 2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """One turn of a chat."""

    role: Annotated[str, one_of("system", "user", "assistant")]
    content: Annotated[str, string()]


@dataclass(frozen=True, kw_only=True)
class Likely:
    """A token with the logarithm of its probability, at least `LEAST_LOGPROB`; `text` has U+FFFD for half a character."""

    id: Annotated[int, whole(0, 2**31 - 1)]
    text: Annotated[str, string(_SHORT * 8)]
    logprob: Annotated[float, decimal(LEAST_LOGPROB, 1e-3)]


@dataclass(frozen=True, kw_only=True)
class TokenLogprob(Likely):
    """A generated token, and the most probable ones in its place."""

    top: Annotated[tuple[Likely, ...], list_of(object_of(Likely), MOST_LOGPROBS)] = ()


# What the head is asked.


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Continue one prompt, given as exactly one of text, messages or tokens.

    With `resumed`, tokens that this stream has already produced (before the head was restarted), the answer continues behind
    them: they are not sent again, count towards `max_tokens`, and the text of the answer begins behind the text sent for them:
    `resumed_characters` of it have reached the side that asks. A temperature of 0 is greedy; `top_k` of 0 means all.
    `choice` is the index among several texts for one prompt with one seed.
    """

    stream: Annotated[int, _stream]
    text: Annotated[str | None, or_none(string())] = None
    messages: Annotated[tuple[ChatMessage, ...] | None, or_none(list_of(object_of(ChatMessage), 4096))] = None
    tokens: Annotated[tuple[int, ...] | None, or_none(_tokens)] = None
    max_tokens: Annotated[int, whole(1, MOST_TOKENS)]
    temperature: Annotated[float, decimal(0.0, 100.0)] = 1.0
    top_p: Annotated[float, decimal(0.0, 1.0)] = 1.0
    top_k: Annotated[int, whole(0, 2**31 - 1)] = 0
    seed: Annotated[int | None, or_none(_seed)] = None
    choice: Annotated[int, whole(0, MOST_CHOICES - 1)] = 0
    stop: Annotated[tuple[str, ...], list_of(string(_SHORT), MOST_STOPS)] = ()
    logprobs: Annotated[int | None, or_none(whole(0, MOST_LOGPROBS))] = None
    echo_tokens: Annotated[bool, truth] = False
    resumed: Annotated[tuple[int, ...], _tokens] = ()
    resumed_characters: Annotated[int, whole(0)] = 0

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.text, self.messages, self.tokens)) != 1:
            raise UnfitError("expected exactly one of text, messages and tokens")


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Nobody waits for this stream any more: free its place before the next step."""

    stream: Annotated[int, _stream]


@dataclass(frozen=True, kw_only=True)
class Pause:
    """The reader of this stream is slow: compute nothing for it until `Resume`."""

    stream: Annotated[int, _stream]


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The reader of a paused stream has caught up."""

    stream: Annotated[int, _stream]


@dataclass(frozen=True, kw_only=True)
class Ping:
    """Send a token through every stage, then answer with a `Pong` of the same number."""

    number: Annotated[int, whole(1)]


@dataclass(frozen=True, kw_only=True)
class Retire:
    """Newer weights are to be served: end as soon as no stream is open; the side that asks keeps new ones back."""


# What the head answers.


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What is served: the head's first message, repeated after it has loaded newer weights."""

    model: Annotated[str, string(_SHORT)]
    weights_sha256: Annotated[str, sha256]
    provenance_sha256: Annotated[str | None, or_none(sha256)] = None
    step: Annotated[int, whole(0)]
    recipe: Annotated[str, string(_SHORT)]
    vocabulary: Annotated[int, whole(1, 2**31)]
    context: Annotated[int, whole(1, MOST_TOKENS)]
    split: Annotated[str, one_of("none", "stages", "columns")]
    ranks: Annotated[int, whole(1, _MOST_RANKS)]
    precision: Annotated[str, string(_SHORT)]
    torch: Annotated[str, string(_SHORT)]
    cpu: Annotated[str, string(_SHORT)]
    threads: Annotated[int, whole(1, _MOST_RANKS)]
    exact: Annotated[bool, truth]
    why_not_exact: Annotated[str | None, or_none(string(_LONGEST_MESSAGE))] = None
    tokenizer_sha256: Annotated[str, sha256]
    template_sha256: Annotated[str, sha256]
    max_streams: Annotated[int, whole(1, 64)]
    max_waiting: Annotated[int, whole(0, 4096)] = 32
    chat_template: Annotated[str | None, or_none(string(_LONGEST_TEMPLATE))] = None
    special_tokens: Annotated[Mapping[str, str], named_texts] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The stream has a place, or waits for one; the seed is the drawn one where none was asked for."""

    stream: Annotated[int, _stream]
    seed: Annotated[int, _seed]
    prompt_tokens: Annotated[tuple[int, ...], _tokens]
    weights_sha256: Annotated[str, sha256]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The stream never began: why, in a sentence, with the numbers that it is about."""

    stream: Annotated[int, _stream]
    code: Annotated[str, one_of("context_too_long", "too_many", "bad_text", "bad_request", "stopping")]
    message: Annotated[str, string(_LONGEST_MESSAGE)]
    numbers: Annotated[Mapping[str, int], named_numbers]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """More of a stream; `text` is whole characters, which may belong to tokens of earlier messages, and may be empty."""

    stream: Annotated[int, _stream]
    ids: Annotated[tuple[int, ...], _tokens]
    text: Annotated[str, string()]
    logprobs: Annotated[tuple[TokenLogprob, ...], list_of(object_of(TokenLogprob), MOST_TOKENS)] = ()


@dataclass(frozen=True, kw_only=True)
class Done:
    """The end of an accepted stream. `computed_after_cancel` counts the tokens computed for it after its `Cancel` arrived."""

    stream: Annotated[int, _stream]
    reason: Annotated[str, one_of("stop", "length", "cancelled", "error")]
    message: Annotated[str | None, or_none(string(_LONGEST_MESSAGE))] = None
    prompt_tokens: Annotated[int, whole(0)]
    reused: Annotated[int, whole(0)] = 0
    generated: Annotated[int, whole(0)]
    computed_after_cancel: Annotated[int, whole(0)] = 0


@dataclass(frozen=True, kw_only=True)
class Pong:
    """A token has passed every stage since the `Ping` of this number."""

    number: Annotated[int, whole(1)]


@dataclass(frozen=True, kw_only=True)
class SentBytes:
    """Bytes that one rank has sent to another since the head's start."""

    source: Annotated[int, whole(0, _MOST_RANKS)]
    target: Annotated[int, whole(0, _MOST_RANKS)]
    count: Annotated[int, whole(0)]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counters of the head since its start, about once a second while it works: seconds of computing by rank, bytes by edge."""

    streams: Annotated[int, whole(0)]
    waiting: Annotated[int, whole(0)]
    steps: Annotated[int, whole(0)]
    rows: Annotated[int, whole(0)]
    kv_bytes_used: Annotated[int, whole(0)]
    kv_bytes_limit: Annotated[int, whole(0)]
    guesses_right: Annotated[int, whole(0)] = 0
    guesses_wrong: Annotated[int, whole(0)] = 0
    busy_seconds: Annotated[tuple[float, ...], list_of(decimal(0.0, 1e12), _MOST_RANKS)] = ()
    sent_bytes: Annotated[tuple[SentBytes, ...], list_of(object_of(SentBytes), _MOST_RANKS)] = ()


# What the supervisor tells the HTTP process.


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How the ranks of the run are: `failed` is the end, after `restarting` comes `running` again; the reason names the rank.

    `retiring`: other ranks are to follow as soon as the open streams have ended.
    """

    state: Annotated[str, one_of("loading", "running", "retiring", "restarting", "failed")]
    reason: Annotated[str | None, or_none(string(_LONGEST_MESSAGE))] = None


ToHead: TypeAlias = Ask | Cancel | Pause | Resume | Ping | Retire
FromHead: TypeAlias = Hello | Accepted | Refused | Tokens | Done | Pong | Stats

TO_HEAD: Final[dict[str, type]] = {one.__name__.lower(): one for one in (Ask, Cancel, Pause, Resume, Ping, Retire)}
FROM_HEAD: Final[dict[str, type]] = {
    one.__name__.lower(): one for one in (Hello, Accepted, Refused, Tokens, Done, Pong, Stats)
}


FROM_SUPERVISOR: Final[dict[str, type]] = {"runstate": RunState}

_RECORDS: Final = frozenset(
    {*TO_HEAD.values(), *FROM_HEAD.values(), RunState, ChatMessage, Likely, TokenLogprob, SentBytes}
)


_JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(message: ToHead | FromHead | RunState) -> bytes:
    """Turn a message into its frame.

    Raises:
        WireError: If its JSON is longer than `LONGEST_FRAME` bytes.
    """
    body = _JSON.encode({"kind": type(message).__name__.lower(), **_plain(message)}).encode()
    if len(body) > LONGEST_FRAME:
        raise WireError(f"a message of {len(body)} bytes is too long: at most {LONGEST_FRAME} can be sent")
    return _LENGTH.pack(len(body)) + body


@functools.cache
def _fields_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """The name and the default of each field. A head sends a message for each token, so they are looked up once."""
    return tuple((one.name, one.default) for one in fields(kind))


def _plain(message: Any) -> dict[str, Any]:
    """What JSON can hold of a message: its fields without those that have their defaults."""
    values = {}
    kind: Any = type(message)  # for mypy, which does not take a class for hashable
    for name, default in _fields_of(kind):
        own = getattr(message, name)
        if own is not default and own != default:
            values[name] = own
            if type(own) is tuple and type(own[0] if own else None) in _RECORDS:  # a tuple holds values of one kind
                values[name] = [_plain(one) for one in own]
    return values


class Decoder:
    """Puts frames together from bytes as they arrive, and parses them.

    Args:
        kinds: What may arrive, by `kind`: `TO_HEAD` or `FROM_HEAD`.
        sender: How errors name the other side.

    Holds at most one frame. After an error it must not be fed again: what follows cannot be told apart.
    """

    def __init__(self, kinds: Mapping[str, type], *, sender: str) -> None:
        self._kinds = kinds
        self._sender = sender
        self._received = bytearray()

    def feed(self, received: bytes) -> Iterator[Any]:
        """Yield the messages that these bytes complete, in their order.

        Raises:
            WireError: If a frame is too long or breaks the rules; messages before it have been yielded.
        """
        self._received += received
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > LONGEST_FRAME:
                raise WireError(
                    f"{self._sender} announced a message of {length} bytes; at most {LONGEST_FRAME} may be sent"
                )
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            body = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield self._parse(body)

    def finish(self) -> None:
        """Check that the connection ended between two messages.

        Raises:
            WireError: If it ended inside one.
        """
        if self._received:
            raise WireError(f"{self._sender} closed the connection inside a message")

    def _parse(self, body: bytes) -> Any:
        try:
            values = json.loads(body)
        except (ValueError, RecursionError):  # also bytes that are no UTF-8, and numbers of too many digits
            raise WireError(f"{self._sender} sent a message that is not JSON") from None
        if type(values) is not dict or type(kind := values.pop("kind", None)) is not str:
            raise WireError(f"{self._sender} sent a message without a kind")
        if kind not in self._kinds:
            raise WireError(f"{self._sender} sent a message of the unknown kind {kind[:_SHORT]!r}")
        try:
            return build(self._kinds[kind], values)
        except UnfitError as unfit:
            raise WireError(f"{self._sender} sent a wrong `{kind}`: {unfit}") from None


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of a socket's file that a Unix address can hold, whatever the length of its folder's; valid inside of `with`."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """Create the head's socket, which only this user may reach (mode 0600), and listen.

    Raises:
        OSError: If the file cannot be made, or is already there.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)  # bind gives the file this mode, so that it is never more open
        with short_path(path) as address:
            listening.bind(address)
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def connect(path: Path) -> socket.socket:
    """Connect to the head's socket.

    Raises:
        OSError: If nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
