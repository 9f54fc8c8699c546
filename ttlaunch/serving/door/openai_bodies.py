"""The bodies of OpenAI's routes: what is served of them, and what is refused by name instead of being ignored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from ttlaunch.serving.checked import MOST, UnfitError, decimal, list_of, or_none, string, truth, whole
from ttlaunch.serving.door.answers import DEFAULT_MAX_TOKENS, AnswerError, check, draw_seed, wrong
from ttlaunch.serving.wire import MOST_CHOICES, MOST_LOGPROBS, MOST_STOPS, MOST_TOKENS, Ask, ChatMessage

NOT_SERVED: Final = frozenset(
    {
        *("audio", "best_of", "echo", "frequency_penalty", "function_call", "functions", "logit_bias", "modalities"),
        *("parallel_tool_calls", "prediction", "presence_penalty", "reasoning_effort", "response_format", "suffix"),
        *("tool_choice", "tools", "use_beam_search", "verbosity", "web_search_options"),
    }
)
"""Keys that would change the answer, and are not served: refused unless they have a value that changes nothing."""

WITHOUT_EFFECT: Final = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Keys that never change the answer; they are taken and not read."""

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    one = string(200)
    return (one(value),) if type(value) is str else list_of(one, MOST_STOPS)(value)


def _message(value: Any) -> ChatMessage:
    """A message whose content is a text, or a list of parts that are texts."""
    if type(value) is not dict:
        raise UnfitError("expected an object")
    role = value.get("role")
    if type(role) is not str or role not in _ROLES:
        raise UnfitError(f"expected one of {', '.join(_ROLES)}", path="role")
    for name in value:
        if name not in {"role", "content", "name"} and value[name] is not None:
            raise UnfitError("is not served here", path=name[:200])
    content = value.get("content")
    if type(content) is list:
        content = "".join(_part(part, place) for place, part in enumerate(content))
    try:
        return ChatMessage(role=_ROLES[role], content=string()(content))
    except UnfitError as unfit:
        raise unfit.inside("content") from None


def _part(part: Any, place: int) -> str:
    if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
        raise UnfitError("only parts of type `text` are served here", path=f"content[{place}]")
    return str(part["text"])


def _prompt(value: Any) -> str | tuple[int, ...]:
    if type(value) is list and len(value) == 1 and type(value[0]) in {str, list}:
        value = value[0]
    if type(value) is list and all(type(one) is int for one in value):
        tokens: tuple[int, ...] = list_of(whole(0, 2**31 - 1), MOST_TOKENS)(value)
        return tokens
    if type(value) is list:
        raise UnfitError("expected one prompt a request: a text, or a list of token ids")
    text: str = string()(value)
    return text


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What else a stream of events shall say."""

    include_usage: bool = False


def _stream_options(value: Any) -> StreamOptions:
    if value is None:
        return StreamOptions()
    if type(value) is not dict or value.keys() - {"include_usage", "include_obfuscation"}:
        raise UnfitError("expected an object with `include_usage`")
    return StreamOptions(include_usage=truth(value.get("include_usage", False)))


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What both routes take. OpenAI's temperature is 1 if none is given."""

    model: Annotated[str | None, or_none(string(200))] = None
    max_tokens: Annotated[int | None, or_none(whole(1, MOST_TOKENS))] = None
    temperature: Annotated[float | None, or_none(decimal(0.0, 2.0))] = None
    top_p: Annotated[float | None, or_none(decimal(0.0, 1.0))] = None
    n: Annotated[int | None, or_none(whole(1, MOST_CHOICES))] = None
    stop: Annotated[tuple[str, ...], _stops] = ()
    seed: Annotated[int | None, or_none(whole(0, MOST))] = None
    stream: Annotated[bool | None, or_none(truth)] = None
    stream_options: Annotated[StreamOptions, _stream_options] = StreamOptions()

    def _asks(self, *, longest: int | None, logprobs: int | None, **prompt: Any) -> list[Ask]:
        """One `Ask` for each of `n` choices, with one seed: each can be repeated alone by seed and choice."""
        seed = draw_seed() if self.seed is None else self.seed
        return [
            Ask(
                stream=1,  # the link numbers it
                max_tokens=longest or DEFAULT_MAX_TOKENS,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                seed=seed,
                choice=choice,
                stop=self.stop,
                logprobs=logprobs,
                **prompt,
            )
            for choice in range(self.n or 1)
        ]


@dataclass(frozen=True, kw_only=True)
class ChatCompletionBody(_Shared):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[tuple[ChatMessage, ...], list_of(_message, 4096)]
    max_completion_tokens: Annotated[int | None, or_none(whole(1, MOST_TOKENS))] = None
    logprobs: Annotated[bool | None, or_none(truth)] = None
    top_logprobs: Annotated[int | None, or_none(whole(0, MOST_LOGPROBS))] = None

    def asks(self) -> list[Ask]:
        """What to ask of the head, one for each choice."""
        if not self.messages:
            raise wrong("messages", "expected at least one message")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "needs `logprobs` to be true")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        longest = self.max_completion_tokens or self.max_tokens
        return self._asks(longest=longest, logprobs=logprobs, messages=self.messages)


@dataclass(frozen=True, kw_only=True)
class CompletionBody(_Shared):
    """The body of `/v1/completions`."""

    prompt: Annotated[str | tuple[int, ...], _prompt]
    logprobs: Annotated[int | None, or_none(whole(0, MOST_LOGPROBS))] = None

    def asks(self) -> list[Ask]:
        """What to ask of the head, one for each choice. OpenAI's limit is 16 tokens if none is given."""
        prompt = {"text": self.prompt} if isinstance(self.prompt, str) else {"tokens": self.prompt}
        return self._asks(longest=self.max_tokens or 16, logprobs=self.logprobs, **prompt)


def read_served(made: type[Any], values: Mapping[str, Any]) -> Any:
    """Make one of these bodies of what a client sent.

    Raises:
        AnswerError: For a key that is not served and would change the answer, an unknown one, or a wrong value.
    """
    left = {}
    for name, value in values.items():
        if name in NOT_SERVED:
            if not _changes_nothing(name, value):
                raise AnswerError(400, f"`{name}` is not served here", code="unsupported_parameter", param=name)
        elif name not in WITHOUT_EFFECT:
            left[name] = value
    return check(made, left)


def _changes_nothing(name: str, value: Any) -> bool:
    if name == "best_of":
        return value in {None, 1}
    if name == "response_format":
        return value is None or value == {"type": "text"}
    if name == "modalities":
        return value is None or value == ["text"]
    if name == "tool_choice":
        return value in {None, "none"} if not isinstance(value, dict) else False
    return value is None or value in (False, 0, "", [], {})
