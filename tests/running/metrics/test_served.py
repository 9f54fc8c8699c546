"""What `ttlaunch report` says of a serving run, from the numbers that its ranks report."""

from ttlaunch.cli.report_tables import render_served, served_lines
from ttlaunch.running.metrics.served import Latency, served_work
from ttlaunch.running.metrics.telemetry import RankTelemetry

HEAD = {
    "texts": 2,
    "tokens": 100,
    "working_us": 2_000_000,
    "waiting_us": 900_000,
    "computing_us": 600_000,
    "sending_us": 100_000,
    "first_token_median_us": 12_000,
    "first_token_p90_us": 20_000,
}
STAGE = {"computing_us": 500_000, "sending_us": 200_000, "waiting_us": 0}


def work_of(*facts):
    return served_work([RankTelemetry(rank, facts=dict(one)) for rank, one in enumerate(facts)])


def test_parts_of_a_rank_add_up_to_the_time_in_which_there_was_something_to_answer():
    found = work_of(HEAD, STAGE)
    head, stage = found.ranks
    assert (0.6, 0.1, 0.9) == (head.computing, head.messages, head.waiting)
    assert (0.5, 0.2) == (stage.computing, stage.messages)
    for one in found.ranks:
        assert abs(one.computing + one.messages + one.waiting + (one.rest or 0) - 2.0) < 1e-9
    assert (50.0, Latency(0.012, 0.02), None) == (found.tokens_per_s, found.first_token, found.token)


def test_a_run_that_serves_nothing_has_none():
    assert work_of({"values": 7}, {"values": 7}) is None


def test_a_rank_that_reported_nothing_leaves_the_shares_unknown():
    assert work_of(HEAD, {}) is None


def test_a_rank_that_claims_more_than_the_whole_time_has_not_waited():
    assert 0.0 == work_of(HEAD, {**STAGE, "computing_us": 10**18}).ranks[1].waiting


def test_the_report_shows_speed_times_and_shares():
    lines = "\n".join(render_served(work_of(HEAD, STAGE), ["head", "stage"]))
    assert "2 texts, 100 tokens in 2.00 s, 50 tokens/s" in lines
    assert "to the first token      12.00   20.00" in lines
    assert "0 head                      30.0%      5.0%    45.0%  20.0%" in lines
    assert "1 stage                     25.0%     10.0%    65.0%      –" in lines
    assert "work\t1 stage\t0.500\t0.200\t1.300\t" in served_lines(work_of(HEAD, STAGE), ["head", "stage"])


def test_before_the_first_text_there_are_no_shares():
    nothing = {**dict.fromkeys(HEAD, 0), "texts": 0}
    assert "0 texts, 0 tokens in 0.00 s" in render_served(work_of(nothing), ["head"])[0]
