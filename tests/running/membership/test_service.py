"""The service of one run: where it listens, what its invitation says, and that it is gone with the run."""

import hashlib
import json
import os
import socket
from contextlib import closing

import pytest

from tests.running.membership.memory import FINGERPRINT, MemoryMembers
from tests.security.listeners import places_of
from ttlaunch import contract
from ttlaunch.records import coordinator as answers
from ttlaunch.running.agents.certificates import Authority
from ttlaunch.running.membership.client import (
    InvitationUrl,
    RefusedError,
    client_on_unix_socket,
    client_over_tls,
    fetch_authority,
    parse_invitation_url,
)
from ttlaunch.running.membership.measure import MeasureError
from ttlaunch.running.membership.service import (
    ListenAddress,
    MeasuredOnce,
    listen_on_network,
    parse_listen_address,
    serving,
)
from ttlaunch.running.runs.run_folder import create_run_folder, scratch_folder

DESCRIBED = {
    "recipe": "data_parallel",
    "layout": "data_parallel",
    "role": "worker",
    "config": "",
    "elastic": {"minimum": 1, "maximum": 4, "micro_batches": 4, "first": 2},
}


@pytest.fixture
def folder(tmp_path):
    return create_run_folder(tmp_path / "runs")


@pytest.fixture
def scratch():
    with scratch_folder() as scratch:
        yield scratch


def serve(folder, scratch, *, host=None, fingerprint=lambda: FINGERPRINT):
    address = None if host is None else ListenAddress(host, 0)
    return serving(
        MemoryMembers(),
        described=DESCRIBED,
        fingerprint=fingerprint,
        authority=Authority(),
        folder=folder,
        scratch=scratch,
        network=None if address is None else (address, listen_on_network(address)),
    )


def place_of(folder):
    return json.loads(folder.file(contract.COORDINATOR_FILE).read_text())


def invited(folder):
    with closing(client_on_unix_socket(place_of(folder)["socket"])) as owner:
        return owner.ask(answers.GivenInvitation, "POST", "/invitations", body={"valid_s": 60.0})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1:7000", ListenAddress("10.0.0.1", 7000)),
        ("gpu-01.lab:0", ListenAddress("gpu-01.lab", 0)),
        ("[fe80::1]:65535", ListenAddress("fe80::1", 65535)),
        ("10.0.0.1:65536", "65536 is no port"),
        ("10.0.0.1", "it is not HOST:PORT"),
        (":7000", "it is not HOST:PORT"),
        ("fe80::1:7000", "an IPv6 address stands in brackets: `[fe80::1]:7000`"),
        ("1:2:3:7000", "it is not HOST:PORT"),
        ("a b:7000", "it is not HOST:PORT"),
        ("host:７", "it is not HOST:PORT"),
    ],
)
def test_an_address_to_listen_at_is_read_or_refused_with_the_rule(text, found):
    assert parse_listen_address(text) == found


def test_without_a_network_only_the_owner_can_ask(folder, scratch):
    before = places_of([os.getpid()])
    with serve(folder, scratch):
        assert places_of([os.getpid()]) == before
        assert place_of(folder)["url"] is None
        assert invited(folder).url is None


def test_a_worker_joins_at_the_address_of_the_invitation(folder, scratch):
    with serve(folder, scratch, host="127.0.0.1"):
        invitation = invited(folder)
        url = parse_invitation_url(invitation.url)
        with closing(client_over_tls(url, fetch_authority(url), token=invitation.token)) as client:
            run = client.ask(answers.RunDescription, "GET", "/run")
    assert (run.run_id, run.recipe, run.fingerprint) == (folder.run_id, "data_parallel", FINGERPRINT)
    assert run.url == invitation.url


def test_it_listens_at_no_other_address_than_the_one_that_was_named(folder, scratch):
    before = set(places_of([os.getpid()]))
    with serve(folder, scratch, host="127.0.0.2"):
        assert {str(address) for address, _ in set(places_of([os.getpid()])) - before} == {"127.0.0.2"}


def test_an_invitation_to_all_addresses_names_this_machine(folder, scratch):
    with serve(folder, scratch, host="0.0.0.0"):  # noqa: S104 - as a user would write it
        url = parse_invitation_url(place_of(folder)["url"])
        assert url.host == socket.gethostname()
        here = InvitationUrl("127.0.0.1", url.port, url.authority)
        assert hashlib.sha256(fetch_authority(here)).hexdigest() == url.authority


def test_everything_is_closed_at_the_end(folder, scratch):
    with serve(folder, scratch, host="127.0.0.1"):
        place = place_of(folder)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", parse_invitation_url(place["url"]).port), 10.0)
    with socket.socket(socket.AF_UNIX) as owner, pytest.raises(OSError, match="refused"):
        owner.connect(place["socket"])


def test_a_taken_port_is_an_error_before_anything_is_served():
    with closing(listen_on_network(ListenAddress("127.0.0.1", 0))) as first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            listen_on_network(ListenAddress("127.0.0.1", first.getsockname()[1]))


def test_a_machine_that_cannot_be_measured_admits_nobody_and_says_why(folder, scratch):
    def measure():
        raise MeasureError("torch cannot be asked: no module named torch")

    with (
        serve(folder, scratch, fingerprint=MeasuredOnce(measure)),
        closing(client_on_unix_socket(place_of(folder)["socket"])) as owner,
    ):
        with pytest.raises(RefusedError, match="no module named torch") as refused:
            owner.ask(answers.RunDescription, "GET", "/run")
        assert owner.ask(answers.Workers, "GET", "/workers").workers == ()
    assert refused.value.status == 503


def test_a_fingerprint_is_measured_once(folder):
    calls = []
    found = MeasuredOnce(lambda: calls.append(1) or FINGERPRINT)
    assert [found(), found()] == [FINGERPRINT, FINGERPRINT]
    assert calls == [1]
