"""The communication profiler: bytes, messages, waiting and time in flight of each operation, all of it measured (E8)."""

import json

import pytest

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.metrics.communication import communication_costs
from ttlaunch.running.metrics.telemetry import read_telemetry

ROWS = [RankRow(0, "near", 0, "worker"), RankRow(1, "near", 1, "worker"), RankRow(2, "far", 0, "server")]
MS = 1_000_000


def write_book(folder, rank, *, sent=(), waited=(), steps=range(1, 5)):
    """Steps of 10 ms; `waited` in µs a step."""
    (folder / contract.RECORDS_DIR).mkdir(exist_ok=True)
    book = {"format": 1, "first": 0, "last": steps[-1], "facts": {}, "sent": list(sent)}
    book["waited"] = [[name, "exchange", {str(step): us for step in steps}] for name, us in waited]
    book["spent"] = [["step", {str(step): 10_000 for step in steps}]]
    (folder / contract.traffic_file(rank)).write_text(json.dumps(book) + "\n")


@pytest.fixture
def run(tmp_path):
    """Two workers send 100 bytes in two messages each step, and first 8 bytes once; a server answers one of them."""
    for rank in range(2):
        sent = [
            ["gradients", None, "backward", 2, [[1, 4, 1, 2, 100]]],
            ["gradients", 0, "start", 2, [[0, 0, 1, 1, 8]]],
        ]
        write_book(tmp_path, rank, sent=sent, waited=[("weights", 1000 + 1000 * rank)])
    write_book(tmp_path, 2, sent=[["weights", None, "exchange", 0, [[2, 4, 2, 1, 400]]]], waited=[("gradients", 5000)])
    return tmp_path


def costs(run):
    found = communication_costs(read_telemetry(run, world_size=3), ROWS, folder=run)
    return {(one.operation, one.role): one for one in found}, [(one.operation, one.role) for one in found]


def test_bytes_and_messages_are_those_of_a_step_of_all_ranks_of_a_role(run):
    """E8: measured, and without what came before the first step."""
    found, _ = costs(run)

    assert (4.0, 200.0) == (found["gradients", "worker"].messages, found["gradients", "worker"].size)
    assert (0.5, 200.0) == (found["weights", "server"].messages, found["weights", "server"].size)
    assert {key: one.flight for key, one in found.items()} == dict.fromkeys(found)


def test_waiting_is_shown_where_it_was_done_the_most_first(run):
    """E8."""
    found, order = costs(run)

    waited = found["weights", "worker"].waited
    assert (0.001, 0.002, 0.15) == (waited.median, waited.p90, pytest.approx(waited.share))
    assert found["gradients", "worker"].waited is None
    assert [("gradients", "server"), ("weights", "worker")] == order[:2]


def test_time_in_flight_is_that_of_both_ends_on_one_clock(run):
    """E8: two messages of 50 bytes, 2 ms and 6 ms under way; the server's clock is 5 s behind."""
    facts = [{"peer": 2, "tag": 7, "number": number, "bytes": 50, "step": 1} for number in (1, 2)]
    sends = [["send", f"gradients {at}", (10 + at) * MS, one] for at, one in enumerate(facts)]
    ends = [(12 - 5000) * MS, (17 - 5000) * MS]
    receives = [["recv", "gradients 0", when, {**one, "peer": 0}] for when, one in zip(ends, facts, strict=True)]
    clocks = [["clock", 0, 5000 * MS, 1000]]
    for rank, events in ((0, sends), (2, [*clocks, *receives])):
        (run / contract.trace_file(rank)).write_text("".join(json.dumps(event) + "\n" for event in events))
    flight = costs(run)[0]["gradients", "worker"].flight

    assert (2, 0.006, pytest.approx(100 / 0.008)) == (flight.messages, flight.median_s, flight.bytes_per_s)


def test_the_table_has_a_line_for_each_operation(ttlaunch, run, here):
    """E8: `ttlaunch report --communication`."""
    rows = [{"rank": row.rank, "host": row.host, "slot": row.slot, "role": row.role} for row in ROWS]
    plan = {"recipe": None, "command": {"name": "r"}, "layout": None, "config": {}, "ranks": rows}
    (run / contract.PLAN_FILE).write_text(json.dumps(plan))
    full, concise = (
        ttlaunch(f"report {run} --communication"),
        ttlaunch(f"report {run} --communication --format concise"),
    )

    table = full.stdout.partition("\n\n")[2]
    assert full.stdout.startswith("cut off: r, 3 ranks, 0 steps\n")
    assert (
        "operation  role    messages/step  bytes/step  waited ms  p90 ms  of step\n"
        "gradients  server              0           0       5.00    5.00    50.0%\n"
        "weights    worker              0           0       1.00    2.00    15.0%\n"
        "gradients  worker              4         200          –       –        –\n"
        "weights    server            0.5         200          –       –        –\n"
        "\n`ttlaunch run … --trace-steps 5` also measures how long messages are under way\n"
    ) == table
    assert "communication\tweights\tworker\t0\t0\t1.00\t2.00\t15.0%\t–\t–" in concise.stdout.splitlines()
    found = json.loads(ttlaunch(f"report {run} --format json").stdout)["communication"]
    assert [("gradients", "server", 0.0), ("weights", "worker", 0.0)] == [
        (one["operation"], one["role"], one["bytes_per_step"]) for one in found[:2]
    ]
