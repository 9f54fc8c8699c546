"""Whom a hang is put down to, from scripted flight recorders and stacks."""

from dataclasses import replace

import pytest

from ttlaunch import contract
from ttlaunch.flight_recorder import ANY, COLLECTIVE, DONE, GROUP, WAIT_ANY, read_recorder
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.records.agents import RankProcess
from ttlaunch.running.failures.stderr_tail import Raised, ThreadError, parse_thread_error
from ttlaunch.running.hang.stacks import Frame, parse_main_stack, recipe_frame
from ttlaunch.running.hang.verdict import judge
from ttlaunch.running.hang.waits import Seen

SEND, RECV, ISEND, IRECV, WAIT_SEND, WAIT_RECV = range(1, 7)
RUNTIME = "/x/ttlaunch/runtime"
STACK = f"""\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/threading.py", line 10 in wait

Current thread 0x00007f02 (most recent call first):
  File "{RUNTIME}/mpi.py", line 281 in _wait
  File "/home/me/mine/loader.py", line 7 in batches
  File "/home/me/mine/trainer.py", line 41 in worker
  File "{RUNTIME}/entry.py", line 99 in _call_role
  File "<frozen runpy>", line 88 in _run_code
"""


@pytest.fixture
def ranks(tmp_path):
    """`ranks([(verb, peer, tag, name), …], …)`: by rank what it did, the last of which lasts if it ends with `...`."""

    def make(*scripts, roles=None, **known):
        seen = []
        for rank, script in enumerate(scripts):
            box = FlightRecorder(tmp_path / contract.recorder_file(rank), rank=rank)
            for entry in script:
                if entry == DONE:
                    box.announce(DONE)
                    continue
                verb, peer, tag, name, *lasts = entry
                box.begin_step(3)
                at = box.begin(verb, (name, None), None, peer=peer, tag=tag, size=8, now=10)
                if not lasts:
                    box.end(at, 20)
            content = read_recorder((tmp_path / contract.recorder_file(rank)).read_bytes())
            more = {name: values[rank] for name, values in known.items() if rank in values}
            seen.append(Seen(rank, roles[rank] if roles else "worker", "box", content, **more))
        return seen

    return make


def verdict(ranks):
    failure = judge(ranks, quiet_s=12.0, now=0.0)
    return failure.code, failure.message


def asked(*peers, tag=7):
    """What a server's box holds that has asked these for a message of the tag, and waits for whoever comes first."""
    return [*[(IRECV, peer, tag, "pushes") for peer in peers], (WAIT_ANY, ANY, tag, "pushes", ...)]


SERVED = ("server", "worker", "worker", "worker")


def test_a_server_that_waits_for_anybody_waits_for_those_who_owe_it_something(ranks):
    """D7: the one worker that does nothing is named, not the server, nor the worker that waits for the server."""
    pushed = [(ISEND, 0, 7, "pushes"), (RECV, 0, 8, "answer", ...)]
    seen = ranks(asked(1, 2, 3), pushed, [], [(ISEND, 0, 7, "pushes"), DONE], roles=SERVED, idle_s={2: 30.0})
    code, said = verdict(seen)
    assert "R014" == code
    assert "rank 2 (worker, box) has not moved for 12 s: 3 ranks wait for it" in said
    table = judge(seen, quiet_s=12.0, now=0.0).evidence
    assert "rank 0 (server)  waits for rank 2" == table[0].partition("  wait for any")[0]
    assert "wait for any of 8 bytes, pushes, tag 7" in table[0]


def test_a_server_that_forgot_to_answer_is_in_the_circle(ranks):
    idle_s = {0: 5.0, 1: 6.0, 2: 4.0, 3: 3.0}
    waits = [(ISEND, 0, 7, "pushes"), (RECV, 0, 8, "answer", ...)]
    seen = ranks([*asked(1, 2, 3), *asked(1, 2, 3)], waits, waits, waits, roles=SERVED, idle_s=idle_s)
    assert ("R015", "rank 1 (worker, box) waits in a circle, 1 → 0 → 1") == (
        verdict(seen)[0],
        verdict(seen)[1].partition(":")[0],
    )


def test_two_that_receive_from_each_other(ranks):
    seen = ranks([(RECV, 1, 0, "a", ...)], [(RECV, 0, 0, "a", ...)], idle_s={0: 5.0, 1: 6.0})
    said = "rank 1 (worker, box) waits in a circle, 1 → 0 → 1: all of them receive and none sends in step 3"
    assert ("R015", said) == verdict(seen)


def test_ranks_of_an_elastic_run_are_known_by_their_numbers_although_some_never_started(ranks):
    """Worker 4 came in place of worker 1, and 3 was never needed."""
    scripts = [[], [], [(RECV, 4, 7, "sums", ...)], [], [(RECV, 2, 7, "sums", ...)]]
    seen = [one for one in ranks(*scripts) if one.rank in {2, 4}]
    said = "rank 2 (worker, box) waits in a circle, 2 → 4 → 2: all of them receive and none sends in step 3"
    assert ("R015", said) == verdict(seen)


def test_two_that_send_to_each_other(ranks):
    seen = ranks([(SEND, 1, 0, "a", ...)], [(WAIT_SEND, 0, 0, "a", ...)], idle_s={0: 5.0, 1: 4.0})
    said = "rank 0 (worker, box) waits in a circle, 0 → 1 → 0: all of them send and none receives in step 3"
    assert ("R015", said) == verdict(seen)


def test_a_rank_that_left_out_what_the_others_sent_is_named(ranks):
    """Rank 0 gathers from rank 1, which waits for the broadcast of rank 2, which has sent its part of the gather."""
    seen = ranks(
        [(RECV, 1, 0, "gather", ...)],
        [(RECV, 2, 1, "broadcast", ...)],
        [(SEND, 0, 0, "gather"), (RECV, 0, 2, "answer", ...)],
        idle_s={0: 3.0, 1: 2.0, 2: 1.0},
    )
    said = (
        "rank 1 (worker, box) has not sent rank 0 (worker) `gather` of tag 0 in step 3, as rank 2 has, "
        "and waits for another message in step 3"
    )
    assert ("R016", said) == verdict(seen)


def test_operations_in_another_order_are_named_on_all_sides(ranks):
    seen = ranks(
        [(RECV, 1, 0, "gather", ...)],
        [(RECV, 2, 1, "broadcast", ...)],
        [(SEND, 0, 2, "gather", ...)],
        roles=("worker", "aggregator", "optimizer"),
        idle_s={0: 3.0, 1: 2.0, 2: 1.0},
    )
    said = (
        "rank 0 (worker, box) waits in a circle, 0 → 1 → 2 → 0: some send while others receive something else; "
        "they are not in the same operation: rank 0 in `gather`, rank 1 in `broadcast`, rank 2 in `gather` in step 3"
    )
    assert ("R015", said) == verdict(seen)


def test_the_one_in_another_operation_than_most_of_its_role_is_named(ranks):
    seen = ranks(
        [(RECV, 2, 0, "sum", ...)],
        [(RECV, 0, 0, "sum", ...)],
        [(RECV, 1, 7, "weights", ...)],
        idle_s={0: 3.0, 1: 2.0, 2: 1.0},
    )
    assert "rank 2 (worker, box) waits in a circle, 2 → 1 → 0 → 2" in verdict(seen)[1]


def test_a_message_of_another_sender_than_the_one_that_is_waited_for(ranks):
    seen = ranks(
        [(RECV, 2, 4, "a", ...)],
        [(SEND, 0, 4, "a"), (RECV, 0, 0, "b", ...)],
        [(RECV, 0, 0, "b", ...)],
        roles=("optimizer", "worker", "aggregator"),
        idle_s={0: 3.0},
    )
    said = "rank 0 (optimizer, box) waits for tag 4 of rank 2 (aggregator), and rank 1 (worker) has sent it instead in step 3"
    assert ("R016", said) == verdict(seen)


@pytest.fixture
def meet(tmp_path):
    """`meet(4, {rank: [name, …]}, lasting=…)`: ranks of a group that has met in operations, the last of which lasts."""

    def make(*scripts, tag_of=(0, 1, 2), starting=()):
        seen = []
        for rank, script in enumerate(scripts):
            box = FlightRecorder(tmp_path / contract.recorder_file(rank), rank=rank)
            tag = box.join_group(tag_of)
            for name, size in script[:-1]:
                box.end(box.begin(COLLECTIVE, (name, None), None, peer=GROUP, tag=tag, size=size, now=10), 20)
            for name, size in script[-1:]:
                if name:
                    box.begin(COLLECTIVE, (name, 2), None, peer=GROUP, tag=tag, size=size, now=10)
            content = read_recorder((tmp_path / contract.recorder_file(rank)).read_bytes())
            seen.append(Seen(rank, "worker", "box", content, is_starting=rank in starting))
        return seen

    return make


def test_the_rank_that_does_not_come_to_an_operation_of_all_is_named(meet):
    seen = meet([("all_reduce", 4000)], [("", 0)], [("all_reduce", 4000)])
    said = "rank 1 (worker, box) has not moved for 12 s: 2 ranks wait for it, and it waits for none, and did not report where it is"
    assert ("R014", said) == verdict(seen)
    assert (
        "rank 0 (worker)  waits for rank 1  all_reduce of 4.0 kB, bucket 2"
        == judge(seen, quiet_s=12.0, now=0.0).evidence[0]
    )


def test_ranks_that_take_one_operation_of_all_for_different_ones_are_named(meet):
    seen = meet([("all_reduce", 4000)], [("all_reduce", 8000)], [("all_reduce", 4000)])
    said = (
        "is in all_reduce of 4.0 kB, bucket 2, and rank 1 (worker) at the same place in all_reduce of 8.0 kB, bucket 2"
    )
    assert ("R037", f"rank 0 (worker, box) {said}") == verdict(seen)


def test_an_operation_of_all_to_which_a_rank_that_is_done_will_not_come(meet, ranks):
    seen = meet([("all_reduce", 4000)], [("", 0)], tag_of=(0, 1))
    done = ranks([], [DONE])[1]
    seen[1] = replace(seen[1], has_left=True)
    said = "rank 0 (worker, box) waits in all_reduce of 4.0 kB, bucket 2 for rank 1 (worker), which is done"
    assert done.is_done
    assert ("R037", said) == verdict(seen)


def test_a_rank_that_has_not_started_is_named_as_such(meet):
    seen = meet([("MPI_Init", 0)], [("MPI_Init", 0)], tag_of=None, starting={0, 1})
    seen[1] = replace(seen[1], recording=None)
    cause = "has not moved for 12 s: 1 rank waits for it, and it waits for none, and did not report where it is"
    assert ("R014", f"rank 1 (worker, box) {cause} while it was starting") == verdict(seen)
    assert "rank 1 (worker)  is starting       does not answer" == judge(seen, quiet_s=1.0, now=0.0).evidence[1]


def test_a_process_that_does_not_end_after_its_role_is_named(ranks):
    seen = ranks([DONE], [DONE])
    seen[0] = replace(seen[0], has_left=True)
    said = "rank 1 (worker, box) has returned from its role, and its process has not ended for 12 s in step 3"
    assert ("R014", said.removesuffix(" in step 3")) == verdict(seen)


def test_a_message_under_another_tag_is_found_though_its_sender_went_on(ranks):
    seen = ranks(
        [(IRECV, 1, 5, "a"), (WAIT_RECV, 1, 5, "a", ...)], [(SEND, 0, 6, "a"), (RECV, 0, 0, "b", ...)], idle_s={0: 9.0}
    )
    said = "rank 0 (worker, box) waits for tag 5 of rank 1 (worker), which has sent it tag 6 instead in step 3"
    assert ("R016", said) == verdict(seen)


def test_messages_under_other_tags_that_were_asked_for_are_no_mismatch(ranks):
    seen = ranks(
        [(RECV, 1, 6, "a"), (RECV, 1, 5, "a", ...)], [(SEND, 0, 6, "a"), (RECV, 0, 0, "b", ...)], idle_s={0: 9.0}
    )
    assert verdict(seen)[0] == "R015"


def test_a_message_of_a_rank_that_is_done_never_comes(ranks):
    seen = ranks([(RECV, 1, 0, "a", ...)], [(RECV, 0, 1, "b"), DONE])
    said = "rank 0 (worker, box) waits for a message of rank 1 (worker), which is done in step 3"
    assert ("R016", said) == verdict(seen)
    assert "rank 1 (worker)  is done" == judge(seen, quiet_s=12.0, now=0.0).evidence[1]


def test_nobody_receives_from_a_rank_that_is_done(ranks):
    seen = ranks([(SEND, 1, 0, "a", ...)], [DONE])
    said = "rank 0 (worker, box) waits until rank 1 (worker) receives, which is done in step 3"
    assert ("R016", said) == verdict(seen)


def test_the_one_that_others_wait_for_is_named_however_long_the_chain_is(ranks):
    stack = parse_main_stack(STACK)
    seen = ranks(
        [(RECV, 1, 0, "a", ...)],
        [(RECV, 2, 0, "a", ...)],
        [(SEND, 0, 0, "a")],
        [],
        roles=("worker", "aggregator", "optimizer", "worker"),
        stack={2: stack},
    )
    said = (
        "rank 2 (optimizer, box) has not moved for 12 s: 2 ranks wait for it, and it waits for none, "
        "in `batches` at loader.py:7 in step 3"
    )
    assert ("R014", said) == verdict(seen)
    failure = judge(seen, quiet_s=12.0, now=0.0)
    assert failure.place == "/home/me/mine/loader.py:7"
    assert (
        "rank 0 (worker)      waits for rank 1  recv of 8 bytes, a, tag 0, step 3",
        "rank 1 (aggregator)  waits for rank 2  recv of 8 bytes, a, tag 0, step 3",
        "rank 2 (optimizer)   waits for none    in `_wait`                         loader.py:7",
        "rank 3 (worker)      waits for none    does not answer",
    ) == failure.evidence


def test_a_stopped_rank_outranks_whoever_waits_or_does_not(ranks):
    seen = ranks([(RECV, 1, 0, "a", ...)], [(RECV, 0, 0, "a", ...)], [], is_stopped={1: True})
    said = "rank 1 (worker, box) was stopped by a signal, and nobody resumed it within 12 s in step 3"
    assert ("R013", said) == verdict(seen)


def test_a_rank_that_does_not_answer_is_told_so(ranks):
    seen = ranks([(RECV, 1, 0, "a", ...)], [(SEND, 0, 1, "a")])
    said = (
        "has not moved for 12 s: 1 rank waits for it, and it waits for none, and did not report where it is in step 3"
    )
    assert ("R014", f"rank 1 (worker, box) {said}") == verdict(seen)


def test_a_rank_alone_waits_for_nobody(ranks):
    seen = ranks([], stack={0: parse_main_stack(STACK)})
    assert ("R014", "rank 0 (worker, box) has not moved for 12 s, in `batches` at loader.py:7") == verdict(seen)


def test_a_message_that_both_ends_began_is_said_to_be_on_its_way(ranks):
    seen = ranks([(RECV, 1, 0, "a", ...)], [(ISEND, 0, 0, "a"), (RECV, 0, 1, "a", ...)], idle_s={0: 9.0, 1: 8.0})
    assert "a message that both ends have begun does not arrive" in verdict(seen)[1]


def test_the_last_dump_of_the_main_thread_counts():
    again = STACK.replace("line 7 in", "line 9 in")
    assert Frame("/home/me/mine/loader.py", 9, "batches") == recipe_frame(parse_main_stack(STACK + again))


@pytest.mark.parametrize(
    "text", ["", "Fatal Python error", "Thread 0x1 (most recent call first):\n  <no Python frame>\n"]
)
def test_what_is_no_stack_is_none(text):
    assert () == parse_main_stack(text)
    assert recipe_frame(parse_main_stack(text)) is None


def at(file, line):
    return (Frame(f"/home/me/mine/{file}", line, "worker"), Frame(f"{RUNTIME}/entry.py", 99, "_call_role"))


def test_of_ranks_that_call_mpi_directly_the_one_at_another_line_is_named(ranks):
    stacks = {0: at("trainer.py", 30), 1: at("trainer.py", 30), 2: at("trainer.py", 41), 3: at("trainer.py", 30)}
    code, said = verdict(ranks([], [], [], [], stack=stacks))
    assert "R014" == code
    apart = (
        "has not moved for 12 s, nor has any other rank, and it stands apart from them, in `worker` at trainer.py:41"
    )
    assert f"rank 2 (worker, box) {apart}" == said


def test_a_thread_that_raised_is_repeated_in_the_verdict_on_its_rank(ranks):
    raised = ThreadError("loader", Raised("ValueError", "shard 7", "/home/me/mine/data.py", 7))
    seen = ranks([(RECV, 1, 0, "answer", ...)], [], stack={1: at("trainer.py", 41)}, thread_error={1: raised})
    failure = judge(seen, quiet_s=12.0, now=0.0)
    assert ("R014", 1, "/home/me/mine/data.py:7") == (failure.code, failure.rank, failure.place)
    assert failure.cause.endswith("; its thread `loader` had raised `ValueError: shard 7`")


def test_the_process_of_a_rank_without_a_stack_is_described(ranks):
    sleeps = RankProcess(rank=1, name="sleep", program="/bin/sleep", does="waits", waits_in="", catches_crashes=False)
    _, said = verdict(ranks([(RECV, 1, 0, "answer", ...)], [], process={1: sleeps}))
    assert said.endswith("and it waits for none, and runs `sleep` without a Python stack and sleeps")


PRINTED = """\
loading
Exception in thread loader:
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 982, in run
    self._target()
  File "/home/me/data.py", line 7, in load
    raise ValueError("shard 7")
ValueError: shard 7
Traceback (most recent call last):
  File "/home/me/other.py", line 1, in later
KeyError: 'what the program printed of another exception that it caught'
"""


def test_the_exception_of_a_thread_is_read_from_what_the_rank_printed():
    found = parse_thread_error(PRINTED)
    assert ThreadError("loader", Raised("ValueError", "shard 7", "/home/me/data.py", 7)) == found
    assert parse_thread_error("Traceback (most recent call last):\nValueError: x\n") is None
    assert parse_thread_error("Exception in thread loader:\n") is None
