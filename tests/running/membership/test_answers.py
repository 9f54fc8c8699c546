"""What the coordinator of a run answers, without a socket: every verb, every refusal, and ranks that no order of arrival changes."""

import json
import random

import pytest

from tests.running.membership.memory import FINGERPRINT, ask, coordinator_in_memory, invited, join, registration
from ttlaunch.records.coordinator import Fingerprint


def refused(coordinator, *request, **caller):
    status, content = ask(coordinator, *request, **caller)
    return status, content["error"]


@pytest.fixture
def run():
    return coordinator_in_memory()


def test_ready_answers_with_the_documented_json_byte_for_byte(run):
    join(run, 1, ip_address="192.168.1.11", port=50052)
    join(run, 0, ip_address="192.168.1.10", port=50051)
    _, content = ask(run, "GET", "/training/ready?min_workers=2", owner=True)
    assert (
        json.dumps(content, indent=2)
        == """\
{
  "ready": true,
  "active_workers": 2,
  "min_workers": 2,
  "workers": [
    {
      "worker_id": "worker-0000",
      "ip_address": "192.168.1.10",
      "port": 50051,
      "rank": 0
    },
    {
      "worker_id": "worker-0001",
      "ip_address": "192.168.1.11",
      "port": 50052,
      "rank": 1
    }
  ]
}"""
    )


def test_too_few_workers_are_not_ready(run):
    join(run)
    content = {"ready": False, "active_workers": 1, "min_workers": 3}
    status, found = ask(run, "GET", "/training/ready?min_workers=3", owner=True)
    assert (status, {**found, "workers": None}) == (200, {**content, "workers": None})


@pytest.mark.parametrize("given", ["", "0", "-1", "two", "1.5", "１", "9" * 30])
def test_a_number_of_workers_below_one_or_no_number_is_refused_with_what_is_expected(run, given):
    status, text = refused(run, "GET", f"/training/ready?min_workers={given}", owner=True)
    assert status == 422
    assert text.endswith("expected a number from 1")


def test_a_misspelled_parameter_is_named_with_the_right_one(run):
    status, content = ask(run, "GET", "/training/ready?min_worker=2", owner=True)
    assert (status, content) == (
        422,
        {"error": "unknown parameter `min_worker`", "hints": ["did you mean `min_workers`?"]},
    )


def test_the_order_in_which_workers_register_does_not_change_their_ranks():
    expected = [{"worker_id": f"worker-{number:04d}", "rank": number} for number in range(8)]
    shuffle = random.Random(18)  # noqa: S311 - the same orders each time
    for _ in range(200):
        coordinator, order = coordinator_in_memory(), list(range(8))
        shuffle.shuffle(order)
        for number in order:
            join(coordinator, number)
        _, content = ask(coordinator, "GET", "/training/ready?min_workers=8", owner=True)
        assert [{key: row[key] for key in ("worker_id", "rank")} for row in content["workers"]] == expected


def test_a_worker_that_registers_again_keeps_its_rank_and_fences_its_older_self(run):
    join(run)
    first = join(run)
    again = ask(run, "POST", "/workers/register", registration(1), token=first["token"])[1]
    assert (first["incarnation"], again["incarnation"]) == (1, 2)
    assert first["rank"] == again["rank"] == 1
    beat = {"incarnation": 1, "epoch": 1, "step": 5}
    for count in (1, 2):
        _, orders = ask(run, "POST", "/workers/worker-0001/heartbeat", beat, token=first["token"])
        assert orders["order"] == "fenced"
        assert ask(run, "GET", "/workers/worker-0001", owner=True)[1]["fenced_messages"] == count
    assert run.members.known[1].step == 0, "a report of the older one must not count"
    assert refused(run, "POST", "/workers/register", registration(1), token=first["token"])[0] == 409
    assert (
        ask(run, "POST", "/workers/worker-0001/heartbeat", {"incarnation": 2}, token=again["token"])[1]["order"] == "go"
    )


def test_a_worker_that_names_another_incarnation_than_its_own_is_refused(run):
    token = join(run)["token"]
    assert refused(run, "POST", "/workers/worker-0000/heartbeat", {"incarnation": 7}, token=token) == (
        403,
        "this token is that of incarnation 1, not 7",
    )


def test_a_worker_cannot_report_leave_or_register_for_another(run):
    one, two = join(run), join(run)
    assert (one["worker_id"], two["worker_id"]) == ("worker-0000", "worker-0001")
    for request in (
        ("POST", "/workers/worker-0000/heartbeat", {"incarnation": 1}),
        ("DELETE", "/workers/worker-0000"),
        ("POST", "/workers/register", registration(0)),
    ):
        assert ask(run, *request, token=two["token"])[0] == 403


def test_an_invitation_does_not_let_its_bearer_take_the_place_of_a_worker(run):
    join(run, 3)
    assert refused(run, "POST", "/workers/register", registration(3), token=invited(run)) == (
        409,
        "worker-0003 takes part; only its own token registers it again",
    )


def test_a_worker_cannot_take_the_number_of_a_rank_that_the_run_starts():
    run = coordinator_in_memory(planned=4)
    assert refused(run, "POST", "/workers/register", registration(2), token=invited(run)) == (
        409,
        "the run starts worker-0002 itself",
    )
    assert join(run)["worker_id"] == "worker-0004"


def test_an_invitation_admits_one_worker_and_is_used_then(run):
    token = invited(run)
    assert ask(run, "POST", "/workers/register", registration(), token=token)[0] == 200
    assert refused(run, "POST", "/workers/register", registration(), token=token) == (
        401,
        "this token has been used already",
    )
    assert ask(run, "GET", "/invitations", owner=True)[1]["invitations"][0]["used_by"] == 0


def test_a_refused_worker_has_not_used_up_its_invitation(run):
    token = invited(run)
    run.members.frozen = "the journal cannot be written"
    assert refused(run, "POST", "/workers/register", registration(), token=token) == (
        409,
        "the journal cannot be written",
    )
    run.members.frozen = ""
    assert ask(run, "POST", "/workers/register", registration(), token=token)[0] == 200


def test_an_invitation_expires_and_can_be_revoked(run):
    token = invited(run, valid_s=60.0, now=100.0)
    assert ask(run, "GET", "/workers", token=token, now=159.9)[0] == 200
    assert refused(run, "GET", "/workers", token=token, now=160.0) == (401, "this token has expired")
    token = invited(run, now=200.0)
    identifier = ask(run, "GET", "/invitations", owner=True, now=200.0)[1]["invitations"][-1]["id"]
    assert ask(run, "DELETE", f"/invitations/{identifier}", owner=True)[0] == 200
    assert refused(run, "POST", "/workers/register", registration(), token=token, now=201.0) == (
        401,
        "this token has been revoked",
    )
    assert ask(run, "DELETE", "/invitations/ffff", owner=True)[0] == 404


@pytest.mark.parametrize("valid_s", [0, 3601, 1e9])
def test_no_invitation_is_valid_for_longer_than_an_hour(run, valid_s):
    status, text = refused(run, "POST", "/invitations", {"valid_s": valid_s}, owner=True)
    assert status == 422
    assert text.endswith("an invitation is valid for 1 to 3600 seconds")


def test_only_the_owner_invites_and_revokes(run):
    token = join(run)["token"]
    for request in (("POST", "/invitations", {"valid_s": 5}), ("GET", "/invitations"), ("DELETE", "/invitations/ab")):
        assert ask(run, *request, token=token)[0] == 403
        assert ask(run, *request)[0] == 401


@pytest.mark.parametrize("target", ["/workers", "/training/ready?min_workers=1", "/epochs", "/run", "/nowhere"])
def test_without_a_token_nothing_is_told(run, target):
    assert refused(run, "GET", target) == (401, "a bearer token is needed")
    assert refused(run, "GET", target, token="guessed")[1] == "this token is unknown"  # noqa: S106 - it is none


def test_an_unknown_field_is_refused_with_the_field_that_was_probably_meant(run):
    body = {**registration(), "have_stepp": 3}
    del body["have_step"]
    status, content = ask(run, "POST", "/workers/register", body, token=invited(run))
    assert (status, content) == (422, {"error": "unknown field `have_stepp`", "hints": ["did you mean `have_step`?"]})
    body = registration()
    body["fingerprint"] = {**body["fingerprint"], "thread": 2}
    assert ask(run, "POST", "/workers/register", body, token=invited(run))[1] == {
        "error": "unknown field `fingerprint.thread`",
        "hints": ["did you mean `threads`?"],
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"port": 0}, "the body cannot be used: `port` is 0, expected the number of a port"),
        ({"port": "80"}, "the body cannot be used: `port` is '80', expected the number of a port"),
        ({"ip_address": "metal-01"}, "`ip_address` is 'metal-01', expected an IP address"),
        ({"ip_address": "::"}, "`ip_address` is ::, at which no other worker can reach this one"),
        ({"worker_id": "worker_1"}, "`worker_1` is no worker, expected a name such as `worker-0003`"),
        ({"certificate_request": "x"}, "`certificate_request` cannot be used: it is no request"),
    ],
)
def test_a_wrong_value_in_a_registration_is_named(run, change, expected):
    assert refused(run, "POST", "/workers/register", {**registration(), **change}, token=invited(run)) == (
        422,
        expected,
    )
    assert run.members.known == {}


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"{", b"[" * 60000, b'{"a":' * 12000])
def test_a_body_that_is_no_object_is_refused_without_an_exception(run, body):
    assert refused(run, "POST", "/workers/register", body, token=invited(run))[0] == 422


def test_each_difference_of_a_worker_is_named_with_both_values_before_the_run_knows_of_it(run):
    others = {
        "release": "00" * 32,
        "recipe": "01" * 32,
        "config": "02" * 32,
        "corpus": "03" * 32,
        "torch": "2.12.0+cpu",
        "cpu_capability": "AVX512",
        "threads": 2,
    }
    for name, value in others.items():
        other = Fingerprint(**{**vars(FINGERPRINT), name: value})
        status, content = ask(run, "POST", "/workers/register", registration(fingerprint=other), token=invited(run))
        assert (status, content) == (
            409,
            {
                "error": f"this worker differs from the run in {name}",
                "differences": [{"field": name, "run": str(getattr(FINGERPRINT, name)), "worker": str(value)}],
            },
        )
    assert run.members.known == {}


def test_a_registered_worker_gets_a_certificate_for_the_name_that_was_assigned_to_it(run):
    answer = join(run, certificate_request="CERTIFICATE REQUEST for rank-0, please")
    assert answer["certificate"] == "a certificate for rank-0"
    assert {key: answer[key] for key in ("worker_id", "incarnation", "rank", "run_id", "lease_s", "heartbeat_s")} == {
        "worker_id": "worker-0000",
        "incarnation": 1,
        "rank": 0,
        "run_id": "2026-08-23T10-14-07",
        "lease_s": 15.0,
        "heartbeat_s": 1.0,
    }


def test_a_heartbeat_carries_the_records_of_the_rank_and_returns_its_orders(run):
    token = join(run)["token"]
    run.members.tell(0, {"what": "prepare", "epoch": 2})
    line = '{"kind": "step", "time": 5.0, "step": 7, "loss": 2.5}'
    beat = {
        "incarnation": 1,
        "epoch": 1,
        "step": 7,
        "tokens_per_s": 900.0,
        "rss": 5000,
        "records": [line],
        "wait_s": 20,
    }
    assert ask(run, "POST", "/workers/worker-0000/heartbeat", beat, token=token) == (
        200,
        {"epoch": 1, "order": "prepare", "messages": [{"what": "prepare", "epoch": 2}]},
    )
    shown = ask(run, "GET", "/workers/worker-0000", owner=True)[1]
    assert {key: shown[key] for key in ("step", "loss", "tokens_per_s", "memory_bytes")} == {
        "step": 7,
        "loss": 2.5,
        "tokens_per_s": 900.0,
        "memory_bytes": 5000,
    }


def test_a_record_that_is_none_is_refused_with_its_number(run):
    token = join(run)["token"]
    beat = {"incarnation": 1, "records": ['{"kind": "done", "time": 1}', '{"kind": "step", "time": "x", "step": 1}']}
    status, text = refused(run, "POST", "/workers/worker-0000/heartbeat", beat, token=token)
    assert (status, text) == (422, "record 1 cannot be used: `time` is 'x', expected seconds since 1970")


def test_a_worker_leaves_at_the_next_boundary_by_itself_or_by_the_owner(run):
    one, _ = join(run), join(run)
    ask(run, "POST", "/workers/worker-0000/heartbeat", {"incarnation": 1, "step": 4}, token=one["token"])
    assert ask(run, "DELETE", "/workers/worker-0000", token=one["token"]) == (200, {"leaves_after_step": 5})
    assert ask(run, "DELETE", "/workers/worker-0001", owner=True) == (200, {"leaves_after_step": 1})
    status, content = ask(run, "DELETE", "/workers/worker-0009", owner=True)
    assert (status, content["error"]) == (404, "there is no worker-0009")
    assert [one["left"] for one in ask(run, "GET", "/workers", owner=True)[1]["workers"]] == ["asked to leave"] * 2


def test_a_worker_that_has_left_may_come_back_under_its_number_with_an_invitation(run):
    join(run), join(run)
    ask(run, "DELETE", "/workers/worker-0001", owner=True)
    again = join(run, 1)
    assert (again["worker_id"], again["incarnation"], again["rank"]) == ("worker-0001", 2, 1)


def test_losses_that_are_no_numbers_are_valid_json(run):
    token = join(run)["token"]
    ask(run, "POST", "/workers/worker-0000/heartbeat", {"incarnation": 1, "loss": "nan"}, token=token)
    content = ask(run, "GET", "/workers", owner=True)[1]
    assert json.loads(json.dumps(content, allow_nan=False))["workers"][0]["loss"] == "nan"


def test_a_wrong_verb_names_the_right_ones(run):
    assert refused(run, "DELETE", "/workers", owner=True) == (405, "`/workers` takes GET, not DELETE")
    assert refused(run, "GET", "/worker", owner=True) == (404, "there is no `/worker`")


def test_the_authority_needs_no_token_because_the_invitation_names_its_hash(run):
    assert ask(run, "GET", "/authority") == (200, {"authority": "the certificate of the authority"})
