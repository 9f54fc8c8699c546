"""A worker that joins from this machine: a real process under a real shim, and a coordinator that really listens."""

import contextlib
import json
import os
import signal
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.running.membership.memory import registration
from tests.running.membership.over_tls import SOON_S, Service, a_token
from ttlaunch import contract
from ttlaunch.agent import SHIM
from ttlaunch.engines.agents import Agents
from ttlaunch.planning.launch_plan import CommandProgram
from ttlaunch.planning.make import Surroundings, plan_program
from ttlaunch.records.coordinator import Welcome
from ttlaunch.running.membership import link
from ttlaunch.running.membership.client import InvitationUrl, client_over_tls, fetch_authority
from ttlaunch.running.membership.link import CoordinatorLink
from ttlaunch.running.membership.members import ENDED, Order, Orders
from ttlaunch.running.membership.taking_part import JoinedRank, Outcome, Wish
from ttlaunch.running.rank_controller import LocalRankController
from ttlaunch.running.runs.run_folder import create_run_folder, scratch_folder, write_plan
from ttlaunch.running.watch import Watch
from ttlaunch.spec.topology.load import load_topology_files

WORKER = textwrap.dedent(
    """\
    import json, os, socket, sys, time
    rank = int(os.environ["TTLAUNCH_RANK"])
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    orders.bind(os.path.join(os.environ["TTLAUNCH_SCRATCH"], f"rank-{rank}.orders"))
    file = open(f"{os.environ['TTLAUNCH_RUN_DIR']}/records/rank-{rank}.progress.jsonl", "a", buffering=1)

    def write(kind, **values):
        file.write(json.dumps({"kind": kind, "time": time.time(), **values}) + "\\n")

    print("a line of its own")
    write("ready", total_steps=None)
    write("member", what="registered", incarnation=0, host="h", address=None)
    orders.settimeout(0.05)
    step = 0
    while True:
        if BODY: exec(BODY)
        try:
            order = json.loads(orders.recv(200000))
        except TimeoutError:
            step += 1
            write("step", step=step, loss=1 / step)
            continue
        write("note", text="ordered: " + order["what"])
        if order["what"] == "dismiss":
            write("done")
            sys.exit(0)
    """
)


def plan_of(body, number):
    loaded = load_topology_files(None, None, environment={}, working_folder=Path.cwd())
    surroundings = Surroundings(Path.cwd(), dict(os.environ), sys.executable, str(SHIM), Agents(sys.executable))
    command = (sys.executable, "-c", f"BODY = {body!r}\n{WORKER}")
    plan = plan_program(
        CommandProgram("worker", command), loaded.topology, surroundings, command=command, roles=("worker",), flows=()
    )
    (row,) = plan.ranks
    return replace(plan, ranks=tuple(replace(row, rank=rank, later=True) for rank in range(number + 1)))


class Joined:
    """A worker with number 2 that takes part in a thread of its own."""

    def __init__(self, service, folder, body="", lease_s=SOON_S):
        self.service, self.wish, self.said = service, Wish(), []
        url = InvitationUrl("127.0.0.1", service.port, service.authority.sha256)
        authority = fetch_authority(url)
        with contextlib.closing(client_over_tls(url, authority, token=a_token(service))) as client:
            welcome = client.ask(Welcome, "POST", "/workers/register", body=registration())
        self.number = int(welcome.worker_id[-4:])
        welcome = Welcome(**{**vars(welcome), "lease_s": lease_s})
        self.link = CoordinatorLink(
            welcome, lambda: client_over_tls(url, authority, token=welcome.token), self.said.append
        )
        self.plan, self.folder = plan_of(body, self.number), create_run_folder(folder)
        write_plan(self.plan, self.folder.path, run_id=self.folder.run_id)
        self.found = None
        self.thread = threading.Thread(target=self._take_part)

    def _take_part(self):
        with scratch_folder() as scratch:
            controller = LocalRankController(self.folder.run_id, scratch=scratch, run_folder=self.folder.path)
            rank = JoinedRank(
                plan=self.plan,
                folder=self.folder,
                scratch=scratch,
                watch=Watch(self.plan, self.folder),
                controller=controller,
                link=self.link,
                engine=Agents(sys.executable),
            )
            self.link.start()
            self.found = rank.take_part(self.wish, os.environ)

    @property
    def members(self):
        return self.service.coordinator.members

    def records(self, kind):
        cls = {"member": "MemberReport", "step": "StepDone", "note": "Note"}[kind]
        return [record for record in list(self.members.records) if type(record).__name__ == cls]

    def wait(self, happened):
        deadline = time.monotonic() + SOON_S
        while not happened():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.01)

    def __enter__(self):
        self.thread.start()
        self.wait(lambda: self.records("step") or self.found)
        return self

    def __exit__(self, *_):
        self.wish.times += 2
        self.thread.join(SOON_S)

    def ends(self):
        self.thread.join(SOON_S)
        assert self.found is not None
        return self.found


@pytest.fixture
def service():
    with Service() as service:
        service.coordinator.members.planned = 2
        yield service


def test_records_go_up_orders_come_down_and_the_logs_stay_here(service, tmp_path):
    with Joined(service, tmp_path / "runs") as joined:
        joined.members.tell(2, {"what": "look"})
        joined.wait(lambda: joined.records("note"))
        joined.members.tell(2, {"what": "dismiss"})
        found = joined.ends()
    assert found.outcome is Outcome.DONE, found
    assert [record.what for record in joined.records("member")] == ["registered"]
    assert [record.text for record in joined.records("note")] == ["ordered: look", "ordered: dismiss"]
    steps = [record.step for record in joined.records("step")]
    assert steps == list(range(1, len(steps) + 1))
    assert joined.folder.file(contract.stdout_file(2)).read_text() == "a line of its own\n"
    assert found.report.status == "done"


def test_what_a_worker_reports_is_what_its_machine_measures(service, tmp_path):
    with Joined(service, tmp_path / "runs") as joined:
        joined.wait(lambda: joined.members.known[2].memory_bytes)
        worker = joined.members.known[2]
        assert 1_000_000 < worker.memory_bytes < 1_000_000_000
        assert worker.step > 0
        assert worker.loss == pytest.approx(1 / worker.step)


def test_the_first_wish_leaves_at_a_boundary(service, tmp_path):
    with Joined(service, tmp_path / "runs") as joined:
        joined.wish.note(signal.SIGINT)
        found = joined.ends()
    assert found.outcome is Outcome.LEFT
    assert found.text.startswith("after step ")
    assert found.report.status == "done"
    assert joined.said[0].startswith("asked to leave at the next boundary")


def test_the_second_wish_ends_it_at_once(service, tmp_path):
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with Joined(service, tmp_path / "runs", ignores) as joined:
        joined.members.leave = lambda _: 10**6
        joined.wish.note(signal.SIGINT)
        joined.wait(lambda: "leaves after step 1000000" in joined.said)
        joined.wish.note(signal.SIGINT)
        found = joined.ends()
    assert found.outcome is Outcome.ENDED
    assert found.report.status == "interrupted"


def test_a_fenced_worker_ends_at_once_and_says_why(service, tmp_path):
    with Joined(service, tmp_path / "runs") as joined:
        joined.service.coordinator.tokens.newest[2] = 7
        found = joined.ends()
    assert found.outcome is Outcome.CUT_OFF
    assert found.text == "another process has registered as worker-0002"


def test_a_silent_coordinator_ends_the_worker_after_the_lease(service, tmp_path):
    with Joined(service, tmp_path / "runs", lease_s=0.5) as joined:
        service.http.close()
        found = joined.ends()
    assert found.outcome is Outcome.CUT_OFF
    assert "has not answered for" in found.text
    assert "connection" in found.text


def test_a_broken_connection_loses_no_record(service, tmp_path):
    with Joined(service, tmp_path / "runs") as joined:
        for _ in range(5):
            count = len(joined.records("step"))
            joined.wait(lambda count=count: len(joined.records("step")) > count)
            for connection in list(service.http._open):
                connection.close()

        def told():  # an order may be lost with its connection, so a coordinator repeats it
            joined.members.tell(2, {"what": "dismiss"})
            joined.thread.join(0.1)
            return joined.found

        joined.wait(told)
    steps = {record.step for record in joined.records("step")}
    assert steps == set(range(1, max(steps) + 1))


def test_a_rank_that_fails_is_named_and_the_run_hears_of_its_end_at_once(service, tmp_path):
    beats = []
    with Joined(service, tmp_path / "runs", "if step == 3: raise ValueError('no more')") as joined:
        heartbeat = joined.members.heartbeat

        def noting(number, beat, records, *, wait_s):
            beats.append(beat.phase)
            return heartbeat(number, beat, records, wait_s=wait_s)

        joined.members.heartbeat = noting
        found = joined.ends()
    assert found.outcome is Outcome.FAILED
    assert found.report.failure.rank == 2
    assert beats[-1] == ENDED


def test_a_worker_that_was_let_go_ends_by_itself(service, tmp_path):
    with Joined(service, tmp_path / "runs") as joined:
        joined.members.heartbeat = lambda *_, **__: Orders(3, Order.LEAVE, ({"what": "dismiss"},))
        found = joined.ends()
    assert found.outcome is Outcome.LEFT
    assert found.text == "the run goes on without it"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (({"kind": "dismiss", "reason": "the run was ordered to stop"},), "the run was ordered to stop"),
        (({"kind": "dismiss", "reason": "gone\x1b[2J" + 999 * "x"},), "gone" + 999 * "x"),
        (("dismiss", {"kind": "dismiss", "reason": 7}), "the run goes on without it"),
    ],
)
def test_why_a_worker_was_let_go_is_said_in_the_run_s_words_and_none_of_them_reaches_the_terminal_as_code(
    messages, said
):
    found = link._reason_in(messages)
    assert found.isprintable()
    assert said[:4] == found[:4]
    assert len(found) <= 200
    assert len(said) > 200 or said == found


def test_an_order_that_is_too_long_for_a_rank_is_dropped(service, tmp_path):
    with Joined(service, tmp_path / "runs") as joined:
        joined.members.tell(2, {"what": "x" * contract.LARGEST_ORDER})
        joined.members.tell(2, {"what": "look"})
        joined.wait(lambda: joined.records("note"))
    assert [record.text for record in joined.records("note")] == ["ordered: look"]


def test_records_that_are_not_for_the_run_stay_here(service):
    sent = CoordinatorLink(
        Welcome(worker_id="worker-0002", incarnation=1, run_id="r", lease_s=1.0, heartbeat_s=1.0, token=""),
        lambda: None,
    )
    step, usage, started = (json.dumps({"kind": kind, "time": 1.0}) for kind in ("step", "usage", "started"))
    sent.report(
        [
            *(line.encode() for line in (step, usage, started)),
            b"no json",
            json.dumps({"kind": "note", "text": "x" * 70_000}).encode(),
        ]
    )
    assert list(sent._lines) == [step, usage]
    assert sent.dropped == 1
