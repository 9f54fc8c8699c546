"""How long the head of a serving run takes for its answers."""

from ttlaunch.runtime.serving.answer_times import AnswerTimes


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_first_tokens_are_counted_from_the_ask_and_further_ones_from_the_one_before():
    clock = Clock()
    times = AnswerTimes(clock)
    times.ask(1)
    clock.now = 2.0
    times.ask(2)
    for now, text, tokens in ((3.0, 1, 1), (3.5, 2, 1), (4.0, 1, 2), (4.25, 1, 0), (5.0, 1, 1)):
        clock.now = now
        times.add(text, tokens)
    found = times.facts()
    assert (2, 5) == (found["texts"], found["tokens"])
    assert (1_500_000, 3_000_000) == (found["first_token_median_us"], found["first_token_p90_us"])
    assert (500_000, 1_000_000) == (found["token_median_us"], found["token_p90_us"])


def test_a_text_that_has_ended_leaves_nothing_and_its_number_begins_anew():
    clock = Clock()
    times = AnswerTimes(clock)
    times.ask(1)
    times.end(1)
    clock.now = 9.0
    times.add(1, 1)
    assert "first_token_median_us" not in times.facts()


def test_only_time_with_something_to_answer_counts_as_work():
    clock = Clock()
    times = AnswerTimes(clock)
    clock.now = 5.0
    with times.working():
        clock.now = 5.5
    clock.now = 9.0
    assert 500_000 == times.facts()["working_us"]
