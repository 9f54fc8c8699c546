"""Joining a run, as far as one process can say it; `running/membership/test_outside.py` joins real ones."""

import time

import pytest

from tests.running.membership.over_tls import Service, a_token
from ttlaunch.app.join import described_run
from ttlaunch.running.membership.client import InvitationUrl, NoAnswerError, client_over_tls, fetch_authority


@pytest.mark.parametrize(("measure_s", "is_described"), [(10.0, True), (0.0, False)])
def test_a_run_may_take_as_long_as_it_needs_to_measure_its_own_machine(monkeypatch, measure_s, is_described):
    monkeypatch.setattr("ttlaunch.app.join.MEASURE_S", measure_s)
    monkeypatch.setattr("ttlaunch.app.join.ANSWER_S", 0.2)
    with Service() as service:
        fingerprint, url = (
            service.coordinator.fingerprint,
            InvitationUrl("127.0.0.1", service.port, service.authority.sha256),
        )
        service.coordinator.fingerprint = lambda: time.sleep(0.6) or fingerprint()
        client = client_over_tls(url, fetch_authority(url), token=a_token(service))
        if is_described:
            assert described_run(client).recipe == "data_parallel"
        else:
            with pytest.raises(NoAnswerError, match="does not answer in time"):
                described_run(client)
        client.close()
