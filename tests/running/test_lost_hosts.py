"""What is said about a host that falls silent, comes back, or is lost."""

import json
import time

import pytest

from ttlaunch import contract
from ttlaunch.errors import HostError, Trouble
from ttlaunch.running.conclude import Ending
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.lost_hosts import Lease, Losses, LostHost, SilenceWatch, SilentHost, connection_after
from ttlaunch.running.runs.run_folder import RunFolder

LOST = LostHost(HostError("far", Trouble.TIMED_OUT, "it has not answered for 18 s"), last_heard=5.0)


class Printed:
    def __init__(self):
        self.lines = []

    def output(self, stream, line):
        self.lines.append((stream, line.decode()))


def watched(folder, *losses, goes_on=False):
    """What is printed, and which events the run has, after the supervisor has seen these losses in turn."""
    view = Printed()
    watch = SilenceWatch(RunFolder("r", folder), view, goes_on=goes_on)
    for one in losses:
        watch.notice(one)
    events = [json.loads(line) for line in (folder / contract.EVENTS_FILE).read_text().splitlines()]
    return view.lines, [(event["event"], event["host"]) for event in events]


def silent():
    return Losses({}, {}, {"far": SilentHost(time.time() - 9.0, time.time() + 8.5)})


def test_a_host_that_is_silent_is_named_once_with_what_is_going_to_happen(tmp_path):
    said = "host far has not answered for 9 s; unless it comes back within 8 s, its ranks end and the run with them"
    assert ([("stderr", said)], [("host_silent", "far")]) == watched(tmp_path, silent(), silent())


def test_a_silent_host_without_which_the_run_goes_on_is_announced_so(tmp_path):
    [(_, said)], _ = watched(tmp_path, silent(), goes_on=True)
    assert "host far has not answered for 9 s; unless it comes back within 8 s, the run goes on without it" == said


def test_a_host_without_which_the_run_goes_on_is_lost_when_its_lease_is_over():
    assert Lease(2.0, goes_on=True).left_s <= 2.0 < Lease(2.0).left_s
    lost_at = [Lease(0.0, goes_on=goes_on).silence().lost_at for goes_on in (True, False)]
    assert lost_at[0] < lost_at[1]


@pytest.mark.parametrize("lease_s", [2.0, 3.0, 15.0, 600.0])
def test_a_lease_outlasts_lost_signs_of_life_and_a_new_connection(lease_s):
    lease = Lease(lease_s)
    # The agent's reading, the next renewal, and one more of both: then the connection is taken for broken.
    assert 4 * lease.renew_s < lease_s
    assert lease.renew_s < lease.quiet_s < lease_s


def test_a_host_that_answers_again_is_named_with_how_long_it_did_not(tmp_path):
    lines, events = watched(tmp_path, silent(), Losses({}, {}))
    assert ("stderr", "host far answers again after 9 s, and nothing of its output is lost") == lines[-1]
    assert [("host_silent", "far"), ("host_back", "far")] == events


def test_a_silent_host_that_is_lost_has_not_come_back(tmp_path):
    lost = Losses({}, {"far": LOST})
    lines, events = watched(tmp_path, silent(), lost, lost)
    assert (1, [("host_silent", "far"), ("host_lost", "far")]) == (len(lines), events)


def test_only_events_of_hosts_say_something_of_a_connection():
    events = ("host_silent", "host_back", "host_lost", "signal")
    assert ["silent", "", "lost", None] == [connection_after(event) for event in events]


def test_hosts_are_lost_to_the_last_and_shims_only_until_the_run_is_being_ended():
    ending = Ending()
    ending.note_losses(Losses({1: 4.0}, {}))
    ending.since = 100.0
    ending.note_losses(Losses({1: 4.0, 2: 4.5}, {"far": LOST}))
    assert ({1: 4.0}, {"far": LOST}) == (ending.lost_shims, ending.lost_hosts)


def test_a_failure_says_with_which_status_its_run_ends():
    others = set(Cause) - {Cause.HOST_LOST, Cause.HUNG}
    assert {contract.STATUS_RANK_FAILED} == {cause.exit_status for cause in others if cause is not Cause.AUDITED}
    assert (contract.STATUS_HOST_LOST, contract.STATUS_HUNG) == (Cause.HOST_LOST.exit_status, Cause.HUNG.exit_status)
