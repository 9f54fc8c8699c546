"""The engine: the same tokens alone and in any company, streams apart from each other, and nothing left when they end."""

import random
import re

import pytest
import torch

from ttlaunch.runtime.serving.ask import Accepted, Ask, Done, Limits, Refused, Sampling, Tokens
from ttlaunch.runtime.serving.engine import Engine
from ttlaunch.runtime.serving.forward import WholeModel
from ttlaunch.runtime.serving.text import ByteTokenizer, IdsTokenizer
from ttlaunch.spec.recipe.serving import cache_bytes, cache_bytes_of_token

from .served_models import VOCABULARY, configuration, random_model, random_texts, training_logits, whole_part

CFG = configuration(length=96)
PROMPTS = [
    tuple(text[:length]) for text, length in zip(random_texts(CFG, count=8), (1, 2, 5, 13, 20, 33, 40, 7), strict=True)
]


@pytest.fixture(scope="module")
def model():
    return random_model(CFG)


class Delayed(WholeModel):
    """Several plans on their way, as with stages on several ranks."""

    depth = 3


class Repeats:
    """A model whose next token is the last one; its logits are those of the row's own token, so streams cannot mix unseen."""

    depth = 1

    def begin(self, plan, tokens):
        self._plan, self._tokens = plan, tokens

    def finish(self):
        ends, wanted = 0, []
        for span in self._plan.spans:
            ends += span.count
            wanted += range(ends - span.wanted, ends)
        return torch.nn.functional.one_hot(self._tokens[wanted], 256) * 100.0


def make_engine(model, *, kind=WholeModel, **limits):
    limits = Limits(**{"context": 96, "max_streams": 4, **limits})
    part = whole_part(CFG, model, slots=limits.max_streams, context=limits.context)
    return Engine(kind(part), IdsTokenizer(VOCABULARY), limits, token_bytes=cache_bytes_of_token(CFG))


def asks(*, count=8, max_tokens=24, **sampling):
    settings = {"temperature": 0.8, "seed": 3, **sampling}
    return [
        Ask(place + 1, prompt, max_tokens, sampling=Sampling(**settings), logprobs=2)
        for place, prompt in enumerate(PROMPTS[:count])
    ]


def run(engine, waiting, *, joins=1.0, seed=0):
    """The tokens and log probabilities of each stream, which join at random."""
    rng, waiting, events = random.Random(seed), list(waiting), []  # noqa: S311  an order, no secret
    while waiting or not engine.is_idle:
        while waiting and (rng.random() < joins or engine.is_idle):
            assert isinstance(engine.submit(waiting.pop(0)), Accepted)
        events += engine.step()
    assert (0, 0, 0) == (engine.stats().streams, engine.stats().cache_tokens, engine.stats().cache_bytes)
    return results(events)


def results(events):
    found = {}
    for event in events:
        if isinstance(event, Tokens):
            ids, logprobs = found.setdefault(event.stream, ([], []))
            ids.extend(event.ids)
            logprobs.extend(event.logprobs)
    return found


@pytest.fixture(scope="module")
def alone(model):
    return {stream: found for ask in asks() for stream, found in run(make_engine(model, guesses=False), [ask]).items()}


@pytest.mark.parametrize(
    "limits",
    [
        {"max_streams": 8},
        {"joins": 0.3},
        *({"prefill_rows": rows, "joins": 0.5} for rows in (1, 7, 13, 32)),
        {"guesses": False, "joins": 0.5},
        {"max_streams": 1},
        {"kind": Delayed, "joins": 0.4},
    ],
    ids=str,
)
def test_tokens_and_their_probabilities_do_not_depend_on_the_batch(model, alone, limits):
    """S2 and S3."""
    settings = {name: value for name, value in limits.items() if name != "joins"}
    assert alone == run(make_engine(model, **settings), asks(), joins=limits.get("joins", 1.0))


def test_greedy_tokens_are_those_of_the_training_forward(model):
    ask = Ask(1, PROMPTS[4], 30, sampling=Sampling(temperature=0))
    ids, _ = run(make_engine(model), [ask])[1]
    text = [*PROMPTS[4], *ids]
    logits = training_logits(model, [text + [0] * (96 - len(text))])[0]
    assert ids == logits[len(PROMPTS[4]) - 1 : len(text) - 1].argmax(-1).tolist()


def test_a_prompt_in_the_cache_gives_the_same_tokens_as_a_new_one(model, alone):
    engine = make_engine(model, max_streams=2)
    first, second = asks()[5], Ask(99, PROMPTS[5], 24, sampling=Sampling(temperature=0.8, seed=3), logprobs=2)
    assert alone[6] == run(engine, [first])[6]
    engine.submit(second)
    events = [event for _ in range(40) for event in engine.step()]
    assert alone[6] == results(events)[99]
    assert [len(PROMPTS[5]) - 1] == [event.reused for event in events if isinstance(event, Done)]


def test_a_beginning_is_copied_from_a_stream_that_is_still_running(model, alone):
    engine = make_engine(model, prefill_rows=64)
    engine.submit(asks()[5])
    events = engine.step()
    for stream in (50, 51):
        engine.submit(Ask(stream, PROMPTS[5], 24, sampling=Sampling(temperature=0.8, seed=3), logprobs=2))
    while not engine.is_idle:
        events += engine.step()
    found = results(events)
    assert alone[6] == found[6] == found[50] == found[51]
    assert {6: 0, 50: 32, 51: 32} == {event.stream: event.reused for event in events if isinstance(event, Done)}


def test_a_stream_goes_on_where_it_was_before_a_restart(model, alone):
    ids, logprobs = alone[3]
    ask = asks()[2]
    resumed = Ask(3, ask.prompt, 24, sampling=ask.sampling, logprobs=2, resumed=tuple(ids[:10]))
    assert (ids[10:], logprobs[10:]) == run(make_engine(model), [resumed])[3]


def test_two_choices_of_one_seed_differ_and_so_do_two_seeds(model):
    settings = [{"seed": 3}, {"seed": 3, "choice": 1}, {"seed": 4}]
    found = [run(make_engine(model), asks(count=1, **each))[1][0] for each in settings]
    assert 3 == len({tuple(ids) for ids in found})


def test_without_a_seed_the_engine_tells_one_that_gives_the_same_tokens(model):
    engine = make_engine(model)
    accepted = engine.submit(asks(count=1, seed=None)[0])
    events = [event for _ in range(24) for event in engine.step()]
    assert results(events) == run(make_engine(model), asks(count=1, seed=accepted.seed))


def test_right_guesses_save_steps_and_change_no_token(model):
    repeated = Ask(1, (5, 6, 7) * 8, 40, sampling=Sampling(temperature=0))
    engines = [make_engine(model, guesses=guesses) for guesses in (True, False)]
    found = [run(engine, [repeated]) for engine in engines]
    assert found[0] == found[1]
    with_guesses, without = (engine.stats() for engine in engines)
    assert without.steps == with_guesses.steps + with_guesses.guesses_right
    assert 0 < with_guesses.guesses_right


@pytest.mark.parametrize(("rows", "steps"), [(1, 40), (4, 11), (16, 4)])
def test_guesses_fill_the_rows_that_a_step_computes_anyway(rows, steps):
    class Counts(Repeats):
        def begin(self, plan, tokens):
            super().begin(plan, (tokens + 1) % 16)

    engine = Engine(Counts(), ByteTokenizer(), Limits(context=96, idle_rows=rows))
    ids, _ = run(engine, [Ask(1, (*range(16), *range(8)), 40, sampling=Sampling(temperature=0))])[1]
    assert [(8 + place) % 16 for place in range(40)] == ids
    assert steps == engine.stats().steps


@pytest.mark.parametrize(("vocabulary", "rows"), [(256, 16), (2000, 8), (100_000, 1)])
def test_a_stage_without_the_head_leaves_room_for_few_guesses_where_logits_are_long(monkeypatch, vocabulary, rows):
    first = random_model(CFG, vocabulary=vocabulary, has_head=False)
    part = whole_part(CFG, first)
    monkeypatch.setattr(
        part.products, "product_rows", lambda _: 16
    )  # as on a CPU with AVX-512 without transposed copies
    assert rows == part.idle_rows


def test_streams_of_a_thousand_asks_never_mix_and_leave_nothing():
    """S4: every byte of a stream is its own letter, while others come, go and are cancelled at random."""
    rng = random.Random(1)  # noqa: S311  an order, no secret
    engine = Engine(Repeats(), ByteTokenizer(), Limits(max_streams=8, max_waiting=4, context=64), token_bytes=1)
    letters, text, ends, number = {}, {}, {}, 0
    while number < 1000 or not engine.is_idle:
        while number < 1000 and rng.random() < 0.6:
            number += 1
            letters[number] = chr(97 + number % 26)
            prompt = rng.choice(["abc", "", "xyz" * 6]) + letters[number]
            if isinstance(engine.submit(Ask(number, prompt, rng.randint(1, 20))), Refused):
                del letters[number]
        if letters and rng.random() < 0.2:
            engine.cancel(rng.choice(list(letters)))
        for event in engine.step():
            assert event.stream not in ends
            if isinstance(event, Tokens):
                text[event.stream] = text.get(event.stream, "") + event.text
            else:
                ends[event.stream] = event
    assert letters.keys() == ends.keys()
    assert {} == {stream: found for stream, found in text.items() if set(found) != {letters[stream]}}
    assert {"length", "cancelled"} == {end.reason for end in ends.values()}
    assert all(end.generated == len(text.get(stream, "")) for stream, end in ends.items())
    assert (0, 0, 0) == (engine.stats().streams, engine.stats().waiting, engine.stats().cache_bytes)


@pytest.mark.parametrize(("kind", "computed"), [(WholeModel, {0}), (Delayed, {0, 1, 2, 3, 4})])
def test_nothing_is_begun_for_a_cancelled_stream(model, kind, computed):
    """S5: at most what is on its way is computed, and its slot is free for the next stream."""
    engine = make_engine(model, kind=kind, max_streams=2)
    for ask in asks(count=3):
        engine.submit(ask)
    engine.step()
    engine.cancel(1)
    assert (2, 0) == (engine.stats().streams, engine.stats().waiting)
    assert 2 * 96 * cache_bytes_of_token(CFG) == engine.stats().cache_limit
    events = [*engine.step(), *engine.step(), *engine.step()]
    (done,) = [event for event in events if isinstance(event, Done) and event.stream == 1]
    assert "cancelled" == done.reason
    assert done.computed_after_cancel in computed
    assert not [event for event in events if isinstance(event, Tokens) and event.stream == 1]


def test_a_paused_stream_gets_no_row_and_later_the_same_tokens(model, alone):
    engine = make_engine(model)
    engine.submit(asks()[4])
    events = [event for _ in range(3) for event in engine.step()]
    engine.pause(5)
    steps = engine.stats().steps
    assert engine.is_idle
    assert [] == engine.step()
    assert steps == engine.stats().steps
    engine.resume(5)
    while not engine.is_idle:
        events += engine.step()
    assert alone[5] == results(events)[5]


def test_a_stop_text_over_several_tokens_is_not_passed_on():
    class Spells(Repeats):
        def finish(self):
            return torch.nn.functional.one_hot(self._tokens[-1:] + 1, 256) * 100.0

    engine = Engine(Spells(), ByteTokenizer(), Limits(guesses=False))
    engine.submit(Ask(1, "a", 20, stops=("zzz", "efg")))
    events = [event for _ in range(9) for event in engine.step()]
    assert "bcd" == "".join(event.text for event in events if isinstance(event, Tokens))
    assert ["stop"] == [event.reason for event in events if isinstance(event, Done)]


def test_a_processor_of_logits_can_forbid_tokens(model):
    def only_even(_tokens, logits):
        return logits.masked_fill(torch.arange(len(logits)) % 2 == 1, float("-inf"))

    ask = Ask(1, PROMPTS[3], 20, processors=(only_even,))
    ids, _ = run(make_engine(model), [ask])[1]
    assert {0} == {token % 2 for token in ids}


@pytest.mark.parametrize(
    ("ask", "code", "message"),
    [
        (Ask(1, (), 3), "bad_text", "at least one token"),
        (Ask(1, "5 x", 3), "bad_text", "'x' is no token id"),
        (Ask(1, (5, 96), 3), "bad_token", "token 96 is outside the vocabulary of 96 tokens"),
        (
            Ask(1, (5,) * 90, 7),
            "context_too_long",
            "90 tokens of the prompt [+] 7 to generate = 97, but the context is 96",
        ),
        (Ask(0, (5,), 3), "stream_in_use", "stream 0"),
        (Ask(1, (5,), 3, sampling=Sampling(temperature=-1)), "bad_setting", "temperature -1"),
        (Ask(1, (5,), 3, sampling=Sampling(temperature=float("nan"))), "bad_setting", "temperature nan"),
        (Ask(1, (5,), 3, sampling=Sampling(top_p=0)), "bad_setting", "top_p 0"),
        (Ask(1, (5,), 3, logprobs=21), "bad_setting", "logprobs 21"),
        (Ask(1, (5,), 0), "bad_setting", "max_tokens 0"),
    ],
)
def test_an_ask_that_cannot_be_served_is_refused_with_its_numbers(model, ask, code, message):
    """S12."""
    engine = make_engine(model)
    refused = engine.submit(ask)
    assert code == refused.code
    assert refused == Refused(1 if ask.stream else 0, code, refused.message, refused.numbers)
    assert re.search(message, refused.message)
    assert engine.is_idle


def test_past_its_slots_and_places_to_wait_the_engine_refuses(model):
    """S7: of 41 streams, 8 have a slot, 32 wait, and the 33rd to wait is refused."""
    engine = make_engine(model, max_streams=8, max_waiting=32)
    found = [engine.submit(Ask(number, (1, 2), 4)) for number in range(1, 42)]
    assert [Accepted] * 40 + [Refused] == [type(one) for one in found]
    assert "too_many" == found[40].code
    assert 40 == engine.stats().streams + engine.stats().waiting


@pytest.mark.parametrize("kind", [{}, {"precision": "bf16"}, {"length": 1100}], ids=str)
def test_the_cache_has_the_bytes_of_the_formula(kind):
    cfg = configuration(**kind)
    part = whole_part(cfg, random_model(cfg), slots=3, context=90)
    assert cache_bytes(cfg, slots=3, context=90) == part.cache.nbytes


def test_logits_that_are_no_numbers_end_their_stream_with_an_error_and_leave_its_neighbour():
    class Broken(Repeats):
        def finish(self):
            logits = super().finish()
            logits[logits.argmax(-1) == ord("!")] = float("nan")
            return logits

    engine = Engine(Broken(), ByteTokenizer(), Limits(guesses=False))
    for number, prompt in ((1, "a!"), (2, "ab")):
        engine.submit(Ask(number, prompt, 4, sampling=Sampling(temperature=0)))
    ends, text = {}, ""
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Done):
                ends[event.stream] = event.reason, event.message
            else:
                assert event.stream == 2
                text += event.text
    assert {1: ("error", "the model's logits are not numbers"), 2: ("length", None)} == ends
    assert "bbbb" == text
    assert 0 == engine.stats().streams
