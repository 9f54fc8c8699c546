"""What a shim reports of a script's rank: the numbers in its output, and what its processes use."""

import os
import subprocess
import sys
import time

import pytest

from ttlaunch import contract
from ttlaunch.agent.run_processes import tree_below
from ttlaunch.agent.script_watch import ScriptWatch, UsageMeter
from ttlaunch.records.ranks import Printed, Usage, read_progress

BUSY = "import os\nfor _ in range(2): os.fork()\nblock = bytearray(os.urandom(1 << 20) * 64)\nprint('up', flush=True)\nwhile True: pass\n"


@pytest.fixture
def watch(tmp_path):
    """`watch(*pieces)`: the records of a rank that has written these pieces, each a descriptor and bytes, and then ended."""

    def run(*pieces):
        path = tmp_path / contract.progress_file(0)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        script = ScriptWatch(str(tmp_path), 0)
        for descriptor, data in pieces:
            script.hear(descriptor, data)
        script.finish(within_s=60)
        records = [read_progress(line) for line in path.read_bytes().splitlines()]
        return [(one.step, one.values) for one in records if isinstance(one, Printed)]

    return run


def test_numbers_of_both_streams_are_reported_in_the_order_in_which_they_were_printed(watch):
    pieces = [(1, b"step=1 loss=0."), (2, b"warn=1\n"), (1, b"5\nnothing here\nstep=2"), (1, b" loss=0.25")]
    assert [(None, {"warn": 1}), (1, {"loss": 0.5}), (2, {"loss": 0.25})] == watch(*pieces)


def test_each_state_of_a_progress_bar_counts(watch):
    assert [(None, {"loss": 2}), (None, {"loss": 1})] == watch((2, b"10% loss=2\r20% loss=1\r"))


def test_a_flood_leaves_the_newest_whole_lines_and_no_half_number(watch):
    pieces = [
        (1, b"".join(b"loss=%d.5\n" % number for number in range(1000, 9000))[at : at + 65_000])
        for at in range(0, 80_000, 65_000)
    ]
    found = watch(*pieces)
    assert (None, {"loss": 8999.5}) == found[-1]
    assert len(found) == 100
    assert all(1000 <= values["loss"] < 9000 for _, values in found)


def test_a_cut_line_without_an_end_has_no_number(watch):
    assert [] == watch((1, b"x" * 40_000), (1, b"y" * 40_000), (1, b"oss=3"), (1, b" a=1"))
    assert [(None, {"b": 2})] == watch((1, b"x" * 40_000), (1, b"y" * 40_000), (1, b" a=1\n"), (1, b"b=2\n"))


def test_a_script_that_makes_up_names_without_end_has_64_of_them(watch):
    found = watch((1, b"".join(b"n%d=1 step=1\n" % number for number in range(90))), (1, b"n3=7 n80=5\n"))
    assert (None, {"n3": 7}) == found[-1]
    assert len({name for _, values in found for name in values}) == 64


def test_usage_counts_children_and_grandchildren():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        try:
            for _ in range(4):
                process.stdout.readline()
            meter = UsageMeter(process.pid, began=time.monotonic())
            first = meter.take()
            deadline = time.monotonic() + 60
            while (used := meter.take())["cpu_percent"] == 0 and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            for pid in [*tree_below(process.pid), process.pid]:
                os.kill(pid, 9)
    assert first["count"] == 3  # all but the first one
    assert first["memory_bytes"] > 64 << 20
    assert 0 < used["cpu_percent"] <= 100 * os.cpu_count() + 50


def test_the_watch_records_usage_while_the_rank_lives(tmp_path):
    path = tmp_path / contract.progress_file(0)
    path.parent.mkdir()
    path.touch()
    with subprocess.Popen(["sleep", "600"]) as process:
        script = ScriptWatch(str(tmp_path), 0)
        deadline = time.monotonic() + 60
        while not path.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
        script.finish(within_s=60)
    (first, *_) = (read_progress(line) for line in path.read_bytes().splitlines())
    assert isinstance(first, Usage)
    assert first.count >= 1
    assert first.memory_bytes > 0


def test_a_full_disk_or_a_removed_folder_does_not_disturb_the_rank(tmp_path):
    script = ScriptWatch(str(tmp_path / "gone"), 0)
    script.hear(1, b"loss=1\n")
    script.finish(within_s=60)
    assert [] == list(tmp_path.iterdir())
