"""The merged log: every byte of every rank once, whole lines, in the order of their times; folded only where equal."""

import json
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch import contract
from ttlaunch.agent.rank_output import RankOutput
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.logs import merge, merged
from ttlaunch.running.logs.fold import WINDOW_S, Fold, parse_only, render_line, render_ranks
from ttlaunch.running.logs.merge import MERGED_FILE, MergedWriter, RankOutputs
from ttlaunch.running.logs.merged import Line, MergedLog
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch

ROWS = tuple(RankRow(rank, "box-b" if rank == 3 else "box-a", rank, role) for rank, role in enumerate("wwwo"))
HOSTILE = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"\r\n",
        b"\xff\xfe",
        b"\xe2\x82",
        b"\xac",
        b"\0",
        b"\x1b[2J",
        b"plain",
        b"x" * 70_000,
        b"rank 0 w | ",
    ]
)


class Ranks:
    """Files of ranks that grow, as shims write them."""

    def __init__(self, folder):
        self.folder = folder
        self.clock = 0.0
        self.whole = {}
        (folder / contract.LOGS_DIR).mkdir(parents=True, exist_ok=True)

    def prints(self, rank, data, *, stream=1, noted=True, over=False):
        name = contract.stdout_file(rank) if stream == 1 else contract.stderr_file(rank)
        with (self.folder / name).open("ab") as file:
            file.write(data)
        self.clock += 1.0
        self.whole[rank, stream] = self.whole.get((rank, stream), b"") + data
        if noted:
            with (self.folder / contract.times_file(rank)).open("a") as file:
                file.write(f"{self.clock:.6f} {stream} {len(self.whole[rank, stream])}{' end' if over else ''}\n")

    def watch(self):
        return Watch(type("Plan", (), {"ranks": ROWS}), RunFolder("run", self.folder))

    def log(self):
        return MergedLog(self.folder, range(len(ROWS)))


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


def said(lines):
    return [(line.rank, line.stream, line.text) for line in lines]


def test_lines_of_all_ranks_come_in_the_order_of_their_times(ranks):
    for rank, data, stream in ((2, b"a\n", 1), (0, b"b\nc\n", 2), (1, b"d\n", 1), (2, b"e\n", 2), (0, b"f\n", 1)):
        ranks.prints(rank, data, stream=stream)
    with MergedWriter(ranks.folder, ranks.watch()) as merged:
        merged.poll()
    assert [b"a", b"b", b"c", b"d", b"e", b"f"] == [line.text for line in ranks.log().poll()]


def test_clocks_of_hosts_are_put_right(ranks):
    ranks.prints(3, b"second\n")
    ranks.prints(0, b"first\n")
    watch = ranks.watch()
    watch.set_clock("box-b", -5.0)
    with MergedWriter(ranks.folder, watch) as merged:
        merged.poll()
    assert [b"first", b"second"] == [line.text for line in ranks.log().poll()]


def test_what_a_host_could_not_keep_has_a_line_at_the_end(ranks):
    ranks.prints(3, b"kept\n", stream=2)
    record = {
        "time": 9.0,
        "status": 0,
        "unkept_output": {"stderr": 1234567},
        "unkept_reason": "No space left on device",
    }
    (ranks.folder / contract.RECORDS_DIR).mkdir()
    (ranks.folder / contract.exit_file(3)).write_text(json.dumps(record))
    watch = ranks.watch()
    watch.set_clock("box-b", 2.0)
    with MergedWriter(ranks.folder, watch) as merged:
        merged.finish()
    lines = list(ranks.log().poll())
    assert [
        (3, "stderr", b"kept"),
        (3, "stderr", b"\xe2\x80\xa6 1,234,567 more bytes of stderr could not be kept"),
    ] == said(lines)
    assert [7.0, 5, 0] == [lines[1].time, lines[1].offset, lines[1].length]


def test_a_line_waits_for_its_end_however_it_arrives(ranks):
    outputs = RankOutputs(ranks.folder, [0])
    for piece in (b"one li", b"ne \xe2", b"\x82\xac"):
        ranks.prints(0, piece)
        assert [] == outputs.poll()
    ranks.prints(0, b"\nnext")
    assert [(0, 13)] == [(one.offset, one.length) for one in outputs.poll()]
    ranks.prints(0, b"", over=True)
    assert [(13, 4)] == [(one.offset, one.length) for one in outputs.poll()]


def test_times_that_arrive_before_their_bytes_wait_for_them(ranks):
    times = ranks.folder / contract.times_file(0)
    times.write_text("1.0 1 6\n")
    outputs = RankOutputs(ranks.folder, [0])
    assert [] == outputs.poll()
    (ranks.folder / contract.stdout_file(0)).write_bytes(b"hello\n")
    assert [6] == [one.length for one in outputs.poll()]


def test_a_progress_bar_shows_its_last_whole_state_and_then_its_end(ranks, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(merge.time, "monotonic", lambda: clock[0])
    with MergedWriter(ranks.folder, ranks.watch()) as merged:
        log = ranks.log()
        ranks.prints(0, b"\r 10%\r 20%\r 3")
        merged.poll()
        assert [] == list(log.poll())
        clock[0] = 2.5
        merged.poll()
        assert [b" 20%"] == [line.text for line in log.poll()]
        ranks.prints(0, b"0%\r 40%\ndone\n")
        merged.poll()
        assert [b" 40%", b"done"] == [line.text for line in log.poll()]
    assert b"\r 10%\r 20%\r 30%\r 40%\ndone\n" == (ranks.folder / contract.stdout_file(0)).read_bytes()


def test_a_line_of_megabytes_is_whole_and_a_longer_one_says_what_is_left_out(ranks):
    ranks.prints(0, b"x" * (3 << 20) + b"\n" + b"y" * (9 << 20) + b"\nnext\n")
    with MergedWriter(ranks.folder, ranks.watch()) as merged:
        merged.poll()
    first, second, third = ranks.log().poll()
    assert b"x" * (3 << 20) == first.text
    assert b"y" * (4 << 20) + b" \xe2\x80\xa6 and 5,242,881 more bytes" == second.text
    assert ((9 << 20) + 1, b"next") == (second.length, third.text)


def test_what_a_killed_launcher_did_not_order_is_still_shown(ranks):
    ranks.prints(0, b"ordered\n")
    with MergedWriter(ranks.folder, ranks.watch()) as merged:
        merged.poll()
    ranks.prints(1, b"later\n")
    ranks.prints(0, b"then\n", stream=2)
    ranks.prints(2, b"never noted", noted=False)
    log = ranks.log()
    assert [b"ordered"] == [line.text for line in log.poll()]
    assert [b"later", b"then", b"never noted"] == [line.text for line in log.rest()]


def test_a_torn_line_of_the_merged_log_is_not_read_before_it_is_whole(ranks):
    ranks.prints(0, b"a\nb\n")
    text = json.dumps({"rank": 0, "stream": "stdout", "time": 1.0, "offset": 0, "length": 2}) + "\n"
    path, log = ranks.folder / MERGED_FILE, ranks.log()
    path.write_text(text[:20])
    assert [] == list(log.poll())
    path.write_text(text + "null\n{}\nnonsense\n")
    assert [b"a"] == [line.text for line in log.poll()]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), HOSTILE, st.booleans()), max_size=40))
def test_no_byte_is_lost_and_no_line_torn(tmp_path_factory, prints):
    ranks = Ranks(tmp_path_factory.mktemp("run"))
    with MergedWriter(ranks.folder, ranks.watch()) as merged:
        for rank, stream, data, polls in prints:
            ranks.prints(rank, data, stream=stream)
            if polls:
                merged.poll()
        merged.finish()
    found = {}
    for line in ranks.log().poll():
        found.setdefault((line.rank, 1 if line.stream == "stdout" else 2), []).append(line)
    expected = {key: data for key, data in ranks.whole.items() if data}
    assert set(expected) == set(found)
    for key, data in expected.items():
        pieces = data.removesuffix(b"\n").split(b"\n")
        assert [piece.rstrip(b"\r").rpartition(b"\r")[2] for piece in pieces] == [line.text for line in found[key]]
        assert data == b"".join(data[line.offset : line.offset + line.length] for line in found[key])


def test_a_rank_that_prints_on_both_streams_leaves_its_bytes_and_their_times(tmp_path):
    (tmp_path / contract.LOGS_DIR).mkdir()
    output = RankOutput(str(tmp_path), {"rank": 0, "role": "w"}, pass_on=False)
    data, threads, files, readers = {1: b"out\xff\n" * 5000, 2: b"err\n" * 5000}, [], [], []
    for stream in (1, 2):
        reader, writer = os.pipe()
        readers.append(os.fdopen(reader, "rb"))
        threads.append(output.copy(readers[-1], stream))
        files.append(os.fdopen(writer, "wb"))
        writing = threading.Thread(target=files[-1].write, args=(data[stream],))
        writing.start()
        threads.insert(0, writing)
    for thread in threads[:2]:
        thread.join(10)
    for file in files:
        file.close()
    for thread in threads[2:]:
        thread.join(10)
    for file in readers:
        file.close()
    assert data[1] == (tmp_path / contract.stdout_file(0)).read_bytes()
    assert data[2] == (tmp_path / contract.stderr_file(0)).read_bytes()
    stretches = RankOutputs(tmp_path, [0]).poll()
    totals = {name: sum(one.length for one in stretches if one.stream == name) for name in ("stdout", "stderr")}
    assert {"stdout": 25_000, "stderr": 20_000} == totals


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def lines(*pairs):
    return [Line(rank, "stdout", 0.0, text.encode(), 0, len(text)) for rank, text in pairs]


def shown(taken):
    return [
        render_line(line, ranks, names=[f"rank {rank} {role}" for rank, role in enumerate("wwwo")]).decode()
        for line, ranks in taken
    ]


def test_the_same_line_of_all_ranks_is_one_at_once():
    fold = Fold(4, clock=Clock())
    fold.add(lines((0, "hi"), (2, "hi"), (1, "hi"), (3, "hi")))
    assert ["×4 ranks 0-3 | hi"] == shown(fold.take())


def test_a_line_waits_a_moment_for_others_and_no_longer():
    clock = Clock()
    fold = Fold(4, clock=clock)
    fold.add(lines((0, "hi"), (1, "one")))
    assert [] == shown(fold.take())
    clock.now = WINDOW_S / 2
    fold.add(lines((3, "hi")))
    clock.now = WINDOW_S
    assert ["×2 ranks 0,3 | hi", "rank 1 w | one"] == shown(fold.take())
    fold.add(lines((2, "hi")))
    assert ["rank 2 w | hi"] == shown(fold.take(everything=True))


def test_lines_of_one_rank_never_pass_each_other():
    fold = Fold(2, clock=Clock())
    fold.add(lines((0, "a"), (0, "b"), (1, "b"), (1, "a"), (1, "a")))
    assert ["rank 0 w | a", "×2 ranks 0-1 | b", "rank 1 w | a", "rank 1 w | a"] == shown(fold.take(everything=True))


def test_a_rank_that_repeats_itself_is_folded_line_by_line():
    fold = Fold(2, clock=Clock())
    fold.add(lines(*[(0, "y")] * 3, *[(1, "y")] * 2))
    assert ["×2 ranks 0-1 | y", "×2 ranks 0-1 | y", "rank 0 w | y"] == shown(fold.take(everything=True))


def test_a_flood_is_let_through_in_order():
    fold = Fold(2, clock=Clock())
    fold.add(lines(*((0, f"{number % 7}") for number in range(50_000))))
    assert [f"rank 0 w | {number % 7}" for number in range(50_000)] == shown(fold.take(everything=True))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {0, 1, 2, 3}),
        (["role=o"], {3}),
        (["rank=0-1,3"], {0, 1, 3}),
        (["host=box-b", "rank=0"], {0, 3}),
        (["rank=0-999999999999999"], {0, 1, 2, 3}),
        (["role=x"], "role=x"),
        (["rank=0", "rank=-1"], "rank=-1"),
        (["rank=4"], "rank=4"),
        (["nonsense"], "nonsense"),
    ],
)
def test_only_names_roles_ranks_and_hosts(words, expected):
    assert expected == parse_only(words, ROWS)


def test_ranks_are_said_as_short_as_can_be():
    assert ["0", "0-1", "0-3,5,7-8", ""] == [render_ranks(r) for r in ([0], [0, 1], [0, 1, 2, 3, 5, 7, 8], [])]


@pytest.mark.timeout(20)
def test_a_log_of_terabytes_of_nothing_is_merged_and_shown_at_once(ranks):
    ranks.prints(0, b"first\n")
    path = ranks.folder / contract.stdout_file(0)
    with path.open("ab") as file:
        file.truncate(2**43)
        file.seek(2**43)
        file.write(b"end\nlast\n")
    with MergedWriter(ranks.folder, ranks.watch()) as merged:
        merged.finish()
    first, hole, last = ranks.log().poll()
    assert (b"first", b"last") == (first.text, last.text)
    assert bytes(100) == hole.text[:100]
    assert hole.text.endswith(b" more bytes")
    assert 2**43 + 4 == hole.offset + hole.length


def test_notes_of_bytes_that_never_come_are_held_up_to_a_limit(ranks, monkeypatch):
    monkeypatch.setattr(merge, "_MOST_HELD", 5)
    with (ranks.folder / contract.times_file(0)).open("w") as file:
        file.write("1.0 1 9000000000000\n" * 1000)
    outputs = RankOutputs(ranks.folder, [0])
    assert [] == outputs.poll()
    assert 5 == len(outputs._held)
    ranks.prints(0, b"all the same\n", noted=False)
    assert [(0, 13)] == [(one.offset, one.length) for one in outputs.finish()]


def test_lines_of_workers_that_come_and_go_have_their_names():
    names = ["worker-0000", "worker-0001", "worker-0002"]
    line = Line(2, "stdout", 0.0, b"text", 0, 4)
    assert b"worker-0002 | text" == render_line(line, [2], names=names, is_elastic=True)
    assert "×2 workers 0,2 | text".encode() == render_line(line, [0, 2], names=names, is_elastic=True)


@pytest.mark.parametrize(("ranks", "opened"), [(2, 2), (40, 120)])
def test_ranks_that_print_in_turns_have_their_files_opened_once_if_they_are_few_and_never_too_many_at_a_time(
    tmp_path, monkeypatch, ranks, opened
):
    (tmp_path / contract.LOGS_DIR).mkdir()
    lines = [(rank, f"rank {rank}, line {number}\n".encode()) for number in range(3) for rank in range(ranks)]
    with (tmp_path / MERGED_FILE).open("w") as order:
        for number, (rank, line) in enumerate(lines):
            with (tmp_path / contract.stdout_file(rank)).open("ab") as file:
                stretch = {"rank": rank, "stream": "stdout", "time": number, "offset": file.tell(), "length": len(line)}
                file.write(line)
            order.write(json.dumps(stretch) + "\n")
    files, real = [], merged.open_regular

    def noted(path):
        files.append(real(path))
        return files[-1]

    monkeypatch.setattr(merged, "open_regular", noted)
    found = []
    for line in MergedLog(tmp_path, [*range(ranks)]).poll():
        found.append((line.rank, line.text + b"\n"))
        assert sum(not file.closed for file in files) <= 16
    assert lines == found
    assert opened == len(files)
    assert all(file.closed for file in files)
