"""A run with a hostile host ends, its report names that host, and what the other hosts have sent stands."""

import pytest

from tests.security.hostile import GOOD_WORDS, HostileHost, greeting, piece, raw_frame, run_beside
from ttlaunch import contract
from ttlaunch.running.agents import host_link

pytestmark = pytest.mark.slow

ALIVE = contract.pack_frame({"kind": "alive", "clock": 1.0, "done": 0})
LIES = {
    "an end of another host's rank": piece(contract.exit_file(0), b'{"status": 1, "time": 1.0}'),
    "a gap of terabytes": piece(contract.stdout_file(1), b"x", offset=2**43),
    "an end that nobody ordered": contract.pack_frame({"kind": "ended", "killed": 2}),
    "a sign of life, and then another host's file": ALIVE + piece(contract.stdout_file(0)),
    "a time of four thousand digits": raw_frame(b'{"kind": "lost_shim", "rank": 1, "time": ' + b"9" * 4000 + b"}"),
}


def ranks_ended(**values):
    """The frame by which an agent reports that all its ranks have ended."""
    return contract.pack_frame({"kind": "ranks_ended", "status": 0, "said": "", **values})


LIES_OF_STARTERS = {
    "a status that no process has": ranks_ended(status=-1),
    "an end of endless words": ranks_ended(said="x" * (5 << 20)),
    "an end whose words are no text": ranks_ended(said=["shim of rank 1 was killed by signal 9"]),
}
BOTH = [("openmpi", name) for name in LIES] + [("agents", name) for name in LIES_OF_STARTERS]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("engine", "lie"), BOTH)
def test_a_lie_ends_the_run_in_the_name_of_its_host_and_takes_nothing_from_the_others(tmp_path, engine, lie):
    says = {**LIES, **LIES_OF_STARTERS}[lie]
    ended = run_beside(HostileHost("evil", lambda: greeting() + says), tmp_path, by_agents=engine == "agents")
    assert "error[R012]: host evil was lost: " in ended.text
    assert (0, 7) == (ended.report.ranks[0]["status"], ended.report.exit_status)
    assert GOOD_WORDS == (ended.folder / contract.stdout_file(0)).read_bytes()
    assert ended.seconds < 30.0


@pytest.mark.timeout(60)
def test_a_record_that_cannot_be_used_is_reported_of_the_hostile_host(tmp_path):
    """The exit record of its own rank comes with times that no record may have."""
    record = b'{"status": 0, "time": "y", "started": ' + b"9" * 4000 + b"}"
    alive = contract.pack_frame({"kind": "alive", "clock": 1.0, "done": 0})
    host = HostileHost("evil", lambda: greeting() + piece(contract.exit_file(1), record) + alive)
    ended = run_beside(host, tmp_path)
    assert "error[R012]: host evil was lost" in ended.text
    assert "records/rank-1.exit.json: `time` is 'y', expected seconds since 1970" in ended.text
    assert GOOD_WORDS == (ended.folder / contract.stdout_file(0)).read_bytes()


@pytest.mark.timeout(60)
def test_a_host_whose_clock_is_three_thousand_years_ahead_ends_the_run_as_any_other(tmp_path):
    error = b'{"type": "ValueError", "message": "no", "time": 1.0, "file": "/etc/shadow", "line": 1}'
    host = HostileHost("evil", lambda: greeting(time=1e11) + piece(contract.error_file(1), error))
    ended = run_beside(host, tmp_path)
    assert "rank 1 (rank, evil) raised ValueError" in ended.text
    assert "root:" not in ended.text


@pytest.mark.timeout(120)
def test_a_host_that_answers_for_ever_and_does_not_end_cannot_keep_the_run_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(host_link, "_END_S", 3.0)
    ended = run_beside(HostileHost("evil", lambda: greeting() + ALIVE, repeats=ALIVE), tmp_path)
    assert "evil" in ended.text
    assert ended.report.ranks[0]["status"] == 0
    assert ended.seconds < 60.0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("by_agents", [False, True], ids=["openmpi", "agents"])
def test_a_host_that_greets_again_and_again_and_then_falls_silent_is_lost(tmp_path, by_agents):
    ended = run_beside(HostileHost("evil", lambda: greeting() + ALIVE), tmp_path, by_agents=by_agents)
    assert "error[R012]: host evil was lost: " in ended.text
    assert ended.report.ranks[0]["status"] == 0, ended.text


KILLED = "shim of rank 0 was killed by signal 9\nstarter on good was killed by SIGKILL\n\x1b[2J"
ENDS_WITHOUT_A_RECORD = {
    "with status 0": ranks_ended(),
    "with another status": ranks_ended(status=2**53),
    "again and again": ranks_ended() * 20_000,
    "in half a character": raw_frame(b'{"kind": "ranks_ended", "status": 0, "said": "\\ud800"}'),
    "in the words of another host": ranks_ended(status=137, said=KILLED),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("says", ENDS_WITHOUT_A_RECORD.values(), ids=ENDS_WITHOUT_A_RECORD)
def test_a_host_that_reports_the_end_of_its_ranks_without_their_records_is_named(tmp_path, monkeypatch, says):
    monkeypatch.setattr(host_link, "_END_S", 3.0)  # it does not end either
    host = HostileHost("evil", lambda: greeting() + says, repeats=ALIVE)
    ended = run_beside(host, tmp_path, by_agents=True)
    assert ended.report.exit_status != 0, ended.text
    assert "evil" in ended.text.partition("\n")[0], ended.text
    assert "good" not in ended.text.partition("\n")[0]
    assert "\x1b" not in ended.text
    assert ended.report.ranks[0]["status"] == 0, ended.text
    assert GOOD_WORDS == (ended.folder / contract.stdout_file(0)).read_bytes()


@pytest.mark.timeout(120)
def test_a_host_whose_ranks_have_ended_and_that_never_says_so_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(host_link, "_END_S", 3.0)
    record = b'{"rank": 1, "pid": 7, "started": 1.0, "time": 2.0, "status": 0, "signal": null}'
    host = HostileHost("evil", lambda: greeting() + piece(contract.exit_file(1), record) + ALIVE, repeats=ALIVE)
    ended = run_beside(host, tmp_path, by_agents=True)
    # Which of its sins comes first depends on when the other rank ends: silence after an order, or the same piece again.
    assert "error[R012]: host evil was lost: " in ended.text
    assert ended.report.ranks[0]["status"] == 0, ended.text
