"""Decides which rows of which streams the next step computes, and which slot of the cache a stream has. No torch, no clock.

A step has the last token of every stream that is not waiting for anything, guesses where rows would be idle, and at most
`prefill_rows` tokens of prompts. A slot keeps its tokens when its stream ends: a later prompt with the same beginning
starts behind it. Reuse changes no bit, because a row's keys and values do not depend on how they were computed.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ttlaunch.runtime.serving.ask import Limits
from ttlaunch.runtime.serving.guesses import Guesser
from ttlaunch.runtime.serving.step_plan import Copy, Span, StepPlan

NO_SLOT = -1
"""In place of a slot, of a stream that waits for one."""


@dataclass
class Stream:
    """A stream as the scheduler sees it.

    Attributes:
        number: The caller's number.
        tokens: Prompt and generated tokens.
        slot: Its slot; `NO_SLOT`: it waits for one.
        computed: Tokens whose keys and values are in the slot, or on their way there.
        reused: Tokens that were there at the beginning.
        is_paused: Whether it gets no rows.
        in_flight: Rows on their way; while there are some, the stream gets no others.
    """

    number: int
    tokens: list[int]
    slot: int = NO_SLOT
    computed: int = 0
    reused: int = 0
    is_paused: bool = False
    in_flight: int = 0
    guesser: Guesser = field(default_factory=Guesser)


@dataclass(frozen=True)
class Work:
    """One step's rows.

    Attributes:
        plan: Where they go.
        tokens: The token of each row.
        streams: The stream of each span.
    """

    plan: StepPlan
    tokens: tuple[int, ...]
    streams: tuple[Stream, ...]


class Scheduler:
    """Streams, slots and steps.

    Attributes:
        streams: All streams by number, those that wait included.
    """

    def __init__(self, limits: Limits, *, groups: int = 1) -> None:
        """Take limits.

        Args:
            limits: Slots, rows, guesses.
            groups: Steps that may be on their way at the same time; each has a part of the streams.
        """
        self.streams: dict[int, Stream] = {}
        self._limits = limits
        self._groups = groups
        self._waiting: deque[Stream] = deque()
        self._kept: list[list[int]] = [[] for _ in range(limits.max_streams)]
        self._owner: list[Stream | None] = [None] * limits.max_streams
        self._copies: list[Copy] = []
        self._step = 0

    @property
    def waiting(self) -> int:
        """The number of streams that wait for a slot."""
        return len(self._waiting)

    @property
    def live(self) -> list[Stream]:
        """The streams that have a slot, in the order of slots."""
        return [owner for owner in self._owner if owner is not None]

    def add(self, number: int, tokens: Sequence[int]) -> Stream:
        """Take a stream, which gets a slot as soon as one is free."""
        stream = Stream(number, list(tokens), guesser=Guesser(tokens))
        self.streams[number] = stream
        self._waiting.append(stream)
        self._fill_slots()
        return stream

    def remove(self, number: int) -> None:
        """Forget a stream; its slot is free at once. Rows that are on their way are computed in vain."""
        stream = self.streams.pop(number)
        if stream.slot == NO_SLOT:
            self._waiting.remove(stream)
            return
        # What is on its way belongs to earlier steps than whatever the slot's next stream computes.
        self._kept[stream.slot] = stream.tokens[: stream.computed]
        self._owner[stream.slot] = None
        self._fill_slots()

    def forget_tokens(self) -> None:
        """Forget what free slots hold; whoever changes the weights calls this while no stream is live."""
        self._kept = [[] for _ in self._kept]

    def next_work(self) -> Work | None:
        """Choose the rows of the next step; None: no stream can get any now."""
        ready = [stream for stream in self.live if not stream.is_paused and not stream.in_flight]
        ready = ready[: -(-len(self.live) // self._groups)]
        if not ready:
            return None
        guessed = self._guesses(ready)
        spans, tokens, chosen, prefill = [], [], [], self._limits.prefill_rows
        for stream in ready:
            left = len(stream.tokens) - stream.computed
            count = left if left == 1 else min(left, prefill)
            if not count:
                continue
            prefill -= count if left > 1 else 0
            extra = guessed.get(stream.number, [])
            rows = stream.tokens[stream.computed : stream.computed + count] + extra
            wanted = 1 + len(extra) if count == left else 0
            spans.append(Span(stream.slot, stream.computed, len(rows), wanted))
            tokens += rows
            stream.in_flight = len(rows)
            chosen.append(stream)
        plan = StepPlan(self._step, tuple(spans), tuple(self._copies))
        self._step += 1
        self._copies = []
        return Work(plan, tuple(tokens), tuple(chosen))

    def accept(self, stream: Stream, span: Span, *, new: Iterable[int]) -> None:
        """Take a span that was computed, and the tokens drawn from its logits, one for each right row.

        Rows of wrong guesses stay in the cache behind the stream's end, and later rows overwrite them.
        """
        added = list(new)
        stream.in_flight = 0
        stream.tokens += added
        for token in added:
            stream.guesser.add(token)
        stream.computed = len(stream.tokens) - 1 if span.wanted else span.start + span.count

    def _guesses(self, ready: Sequence[Stream]) -> dict[int, list[int]]:
        """Guesses of streams that have their last token to compute, if fewer rows have work than a step computes in any case."""
        idle = self._limits.idle_rows - sum(len(stream.tokens) - stream.computed for stream in ready)
        if not self._limits.guesses or idle <= 0:
            return {}
        found = {}
        for stream in ready:
            if len(stream.tokens) - stream.computed > 1:
                continue
            guesses = stream.guesser.guess(min(idle, self._limits.context - len(stream.tokens)))
            found[stream.number] = guesses
            idle -= len(guesses)
        return found

    def _fill_slots(self) -> None:
        while self._waiting and any(owner is None for owner in self._owner):
            self._give_slot(self._waiting.popleft())

    def _give_slot(self, stream: Stream) -> None:
        """Choose the free slot with the longest common beginning; if a slot in use has a longer one, copy that."""
        most = len(stream.tokens) - 1  # the last token's row gives the logits, so it is always computed
        free = [slot for slot, owner in enumerate(self._owner) if owner is None]
        common = [min(most, _common_length(stream.tokens, self._content(slot))) for slot in range(len(self._kept))]
        # With equally long beginnings, take the slot that keeps the fewest other tokens.
        best = min(free, key=lambda slot: (-common[slot], len(self._kept[slot])))
        source = max(range(len(common)), key=lambda slot: (common[slot], slot == best))
        reused = common[best]
        if common[source] > reused and len(self._copies) < len(self._owner):  # as many as a plan may have
            best, reused = min(free, key=lambda slot: len(self._kept[slot])), common[source]
            if best != source:
                self._copies.append(Copy(source, best, reused))
        stream.slot, stream.computed, stream.reused = best, reused, reused
        self._owner[best], self._kept[best] = stream, []

    def _content(self, slot: int) -> list[int]:
        """The tokens whose keys and values a slot holds."""
        owner = self._owner[slot]
        return self._kept[slot] if owner is None else owner.tokens[: owner.computed]


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)
