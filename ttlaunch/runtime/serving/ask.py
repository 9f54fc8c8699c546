"""What goes into the serving engine and what comes out of it: asks, answers, events, limits. No torch.

A stream is one text that is being generated; whoever asks for it gives it a number that is never used twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MOST_LOGPROBS = 20
"""The largest number of likeliest tokens that an ask may want to know beside each token."""

RefusalCode = Literal["context_too_long", "too_many", "stream_in_use", "bad_text", "bad_token", "bad_setting"]
Reason = Literal["stop", "length", "cancelled", "error"]


class LogitProcessor(Protocol):
    """Changes the logits of a stream's next token, for example so that only some tokens can follow."""

    def __call__(self, tokens: Sequence[int], logits_V: "Tensor") -> "Tensor":
        """Return the logits to draw from, shape (V,).

        Args:
            tokens: The prompt and all tokens generated so far. Only read.
            logits_V: The model's logits, float32. Only read.
        """


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits. Equal settings, prompt and weights give equal tokens, whatever runs beside.

    Attributes:
        temperature: Logits are divided by it; 0: always the likeliest token.
        top_p: Only the likeliest tokens whose probabilities add up to this; 1: all.
        top_k: Only so many of the likeliest tokens; None: all. It is applied before `top_p`.
        seed: Seed of the noise; None: the engine draws one and reports it in `Accepted`.
        choice: Which of several texts for one prompt and seed; each has noise of its own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    choice: int = 0


@dataclass(frozen=True)
class Ask:
    """A text to continue.

    Attributes:
        stream: A positive number that the caller chooses, different for each ask.
        prompt: The text to continue, or its tokens.
        max_tokens: The largest number of tokens to generate, those of `resumed` included.
        sampling: How tokens are drawn.
        stops: Generation ends before one of these texts, which is not passed on.
        logprobs: Number of likeliest tokens to report with each token; None: report no probabilities.
        resumed: Tokens generated earlier, before a restart; events report only those that follow.
        processors: What changes logits before a token is drawn, in this order.
    """

    stream: int
    prompt: str | tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    resumed: tuple[int, ...] = ()
    processors: tuple[LogitProcessor, ...] = ()


@dataclass(frozen=True)
class Accepted:
    """An ask that the engine took.

    Attributes:
        stream: The ask's number.
        seed: The seed in use, given or drawn.
        prompt_tokens: The tokens of the prompt.
    """

    stream: int
    seed: int
    prompt_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """An ask that the engine did not take, with the reason.

    Attributes:
        stream: The ask's number.
        code: Which rule the ask breaks.
        message: The reason for people; it holds the wrong value and the limit.
        numbers: The numbers of the message, by name.
    """

    stream: int
    code: RefusalCode
    message: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Logprob:
    """A token with natural logarithms of probabilities, of the model's own logits: before temperature and processors.

    Attributes:
        token: The token.
        logprob: Its logarithm.
        likeliest: The likeliest tokens with theirs, in descending order; as many as the ask wants.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Tokens:
    """New tokens of a stream.

    Attributes:
        stream: The stream.
        ids: The tokens in order; at least one, or none if only text that was held back follows.
        text: What can be passed on: whole characters, and nothing that could be the beginning of a stop text.
        logprobs: One entry for each of `ids` if the ask wants them, otherwise empty.
    """

    stream: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Done:
    """The end of a stream; no event of it follows.

    Attributes:
        stream: The stream.
        reason: `stop`: a stop text or the tokenizer's last token; `length`: `max_tokens`; `cancelled`; `error`.
        message: What went wrong, if something did.
        prompt_tokens: Tokens of the prompt.
        reused: Tokens of the prompt, and of those resumed, whose keys and values were already in the cache.
        generated: Tokens that events reported.
        computed_after_cancel: Rows that were computed for the stream after its cancellation, because they were on their way.
    """

    stream: int
    reason: Reason
    message: str | None
    prompt_tokens: int
    reused: int
    generated: int
    computed_after_cancel: int


Event = Tokens | Done


@dataclass(frozen=True)
class Limits:
    """How much an engine takes on.

    Attributes:
        max_streams: Streams that are computed at the same time: slots of the cache.
        max_waiting: Streams that wait for a slot; another one is refused.
        context: The largest number of tokens of a stream, prompt and generated ones together; at most the training's
            `max_sequence_length`.
        prefill_rows: The largest number of prompt tokens computed in one step.
        guesses: Whether a step with few streams also computes guessed tokens. They change no token, only the time.
        idle_rows: Rows that a step computes in any case; guesses may take the place of those that no stream needs.
    """

    max_streams: int = 8
    max_waiting: int = 32
    context: int = 64
    prefill_rows: int = 64
    guesses: bool = True
    idle_rows: int = 4


@dataclass(frozen=True)
class Stats:
    """What an engine has done since it was made, and what it has at present.

    Attributes:
        streams: Streams that have a slot.
        waiting: Streams that wait for one.
        steps: Steps computed.
        rows: Rows computed in these steps: tokens of prompts, last tokens and guesses.
        prompt_tokens: Tokens of prompts, of accepted asks.
        reused_tokens: Those of them that were in the cache.
        tokens: Tokens generated.
        cancelled: Streams cancelled.
        guesses_right: Guesses that were the token drawn.
        guesses_wrong: Guesses that were not.
        cache_tokens: Tokens whose keys and values streams hold at present; 0 when no stream has a slot.
        cache_bytes: Bytes of these, over all ranks.
        cache_limit: Bytes that all streams together can hold so.
    """

    streams: int = 0
    waiting: int = 0
    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    cancelled: int = 0
    guesses_right: int = 0
    guesses_wrong: int = 0
    cache_tokens: int = 0
    cache_bytes: int = 0
    cache_limit: int = 0


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens after which a text is over."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            ValueError: The text has a character for which there is no token; the message names it.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes of UTF-8 that a token stands for; they need not be whole characters."""
