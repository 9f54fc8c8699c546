"""Pages of output: from any place, in both directions, the same lines as `ttlaunch logs`, and no more than a page is read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dashboard.made_run import MadeRun
from tests.examples import examples
from ttlaunch import contract
from ttlaunch.running.logs import pages
from ttlaunch.running.logs.merged import Line, MergedLog
from ttlaunch.running.logs.pages import Place, Wanted, fold_page, page_after, page_before, parse_place
from ttlaunch.running.metrics.event_log import EventLog
from ttlaunch.running.metrics.log_entries import LogEntries

EVERYTHING = Wanted(ranks=(0, 1))


def all_backwards(folder, wanted, most):
    place, found = pages.end_of(folder), []
    while True:
        page = page_before(folder, place, wanted, most=most)
        assert len(page.lines) <= most
        found[:0] = [unjudged(line) for line, _, _ in page.lines]
        if page.is_first:
            return found
        assert (page.before.index, page.before.inner) < (place.index, place.inner)
        place = page.before


def unjudged(line):
    return Line(line.rank, line.stream, line.time, line.text, line.offset, line.length)


def all_forwards(folder, wanted, most):
    place, found = Place(), []
    while True:
        page = page_after(folder, place, wanted, most=most)
        found += [unjudged(line) for line, _, _ in page.lines]
        if page.is_last:
            return found
        assert place != page.after
        place = page.after


@given(
    printed=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["a", "b\u2028c", "", "x" * 9]), st.integers(1, 7)), max_size=12
    ),
    most=st.integers(1, 9),
)
@settings(max_examples=examples(60), deadline=None)
def test_pages_of_any_size_in_both_directions_are_the_whole_output_once(tmp_path_factory, printed, most):
    run = MadeRun(tmp_path_factory.mktemp("runs") / "run")
    for rank, text, times in printed:
        run.print(rank, f"{text}\n" * times)
    expected = list(MergedLog(run.path, [0, 1]).poll())

    assert expected == all_backwards(run.path, EVERYTHING, most)
    assert expected == all_forwards(run.path, EVERYTHING, most)


def test_a_page_of_a_long_stretch_reads_a_piece_of_it(make_big, monkeypatch):
    run = make_big(lines=200_000)
    read = []
    true_read = pages._read
    monkeypatch.setattr(pages, "_read", lambda *at: read.append(at[-1]) or true_read(*at))
    page = page_before(run.path, pages.end_of(run.path), EVERYTHING, most=100)

    assert [f"line {number}".encode() for number in range(199_900, 200_000)] == [line.text for line, _, _ in page.lines]
    assert sum(read) < 400_000 < (run.path / contract.stdout_file(0)).stat().st_size


def test_a_filter_that_matches_nothing_searches_a_bounded_part_and_says_where_to_go_on(make_big, monkeypatch):
    monkeypatch.setattr(pages, "_MOST_BYTES", 1 << 18)
    run = make_big(lines=70_000)
    page = page_before(run.path, pages.end_of(run.path), Wanted(ranks=(0,), text="nowhere"), most=100)

    assert () == page.lines
    assert not page.is_first
    found = all_backwards(run.path, Wanted(ranks=(0,), text="line 7\n".strip()), 100_000)
    assert all(b"line 7" in line.text for line in found)
    assert b"line 7" == found[0].text


@pytest.fixture
def make_big(tmp_path):
    def make(lines):
        run = MadeRun(tmp_path / "run")
        run.print(0, "".join(f"line {number}\n" for number in range(lines)))
        return run

    return make


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no\n'


def test_the_page_and_servers_of_logs_give_every_line_the_same_level(tmp_path):
    """The lines inside of a traceback are errors wherever a page begins."""
    run = MadeRun(tmp_path / "run")
    for number in range(40):
        run.print(number % 2, TRACEBACK + "after\n", stream="stderr", time=number)
        run.print(number % 2, "12:00 | DEBUG | x\nWARN: disk\nFATAL no\nerrors: 0\n", time=number)
    sent = {
        (int(one.source.partition(":")[0]), one.source.partition(":")[2], one.end): one.level.lower()
        for one in LogEntries(run.path, EventLog(run.path).run).poll()
    }
    place, seen = pages.end_of(run.path), {}
    while True:
        page = page_before(run.path, place, Wanted((0, 1)), most=7)
        seen |= {(line.rank, line.stream, line.offset + line.length): line.level for line, _, _ in page.lines}
        if page.is_first:
            break
        place = page.before
    assert 320 == len(seen)
    assert sent == seen
    assert {"debug", "info", "warning", "error", "critical"} == set(seen.values())


def test_lines_are_chosen_by_rank_stream_level_and_text(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.print(0, "one\n")
    run.print(1, "Two INFO\n")
    run.print(1, "ERROR three\n", stream="stderr")

    def texts(**wanted):
        found = page_before(run.path, pages.end_of(run.path), Wanted(**{"ranks": (0, 1), **wanted}), most=10)
        return [line.text.decode() for line, _, _ in found.lines]

    assert ["one"] == texts(ranks=(0,))
    assert ["ERROR three"] == texts(streams=("stderr",))
    assert ["ERROR three"] == texts(least=pages.LEVELS.index("warning"))
    assert ["Two INFO"] == texts(text="two i")


def test_equal_lines_of_ranks_at_about_the_same_time_are_one(tmp_path):
    run = MadeRun(tmp_path / "run")
    for rank, time in ((0, 1.0), (1, 1.05), (0, 9.0), (1, 19.0)):
        run.print(rank, "same\n", time=time)
    page = page_before(run.path, pages.end_of(run.path), EVERYTHING, most=10)

    assert [(0, 1), (0,), (1,)] == [ranks for _, ranks, _ in fold_page(page, num_ranks=2).lines]


def test_a_new_page_begins_where_the_last_one_ended_while_the_output_grows(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.print(0, "one\n")
    page = page_before(run.path, pages.end_of(run.path), EVERYTHING, most=10)
    run.print(1, "two\n")
    newer = page_after(run.path, page.after, EVERYTHING, most=10)

    assert [b"two"] == [line.text for line, _, _ in newer.lines]
    assert () == page_after(run.path, newer.after, EVERYTHING, most=10).lines


@pytest.mark.parametrize("text", ["", "1", "1.", "-1.0", "1.2.3", "١.0", "9" * 17 + ".0"])
def test_a_text_that_is_no_place_is_refused(text):
    assert parse_place(text) is None
    assert Place(12, 3) == parse_place("12.3")
