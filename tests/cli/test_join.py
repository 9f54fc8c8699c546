"""`ttlaunch join` as a user types it: a real command and a real rank of data_parallel, against a coordinator that really listens."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.running.membership.memory import invited
from tests.running.membership.over_tls import SOON_S, Service, a_token
from ttlaunch.agent.run_processes import processes_of_runs
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.membership.messages import Dismiss, Member, order_to_json
from ttlaunch.records.coordinator import Fingerprint
from ttlaunch.running.agents.certificates import Authority
from ttlaunch.running.membership.measure import measure_fingerprint

pytestmark = pytest.mark.slow  # each starts a real rank

SPEC = RunSpec("data_parallel", ranks=2, elastic="1:4")


@pytest.fixture(scope="module")
def prepared():
    return prepare(SPEC, Unattended())


@pytest.fixture(scope="module")
def here(prepared):
    return measure_fingerprint(prepared.plan)


@pytest.fixture
def service(prepared, here):
    with Service() as service:
        coordinator = service.coordinator
        coordinator.members.planned = 2
        coordinator.run.update(layout=prepared.plan.program.layout, config=prepared.resolved_config)
        coordinator.fingerprint = lambda: here
        yield service


def url_of(service, authority=None):
    return f"https://127.0.0.1:{service.port}#{(authority or service.authority).sha256}"


@contextlib.contextmanager
def joining(url, token, *options, folder):
    """The command, in a folder of its own; it is killed at the end if it still runs."""
    command = [sys.executable, "-m", "ttlaunch", "join", url, "--runs-dir", str(folder / "runs"), *options]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    try:
        process.stdin.write(token)
        process.stdin.close()
        process.stdin = None
        yield process
    finally:
        process.kill()
        process.communicate()


def answer_of(url, token, *options, folder):
    with joining(url, token, *options, folder=folder) as process:
        stdout, stderr = process.communicate(timeout=2 * SOON_S)
        return process.returncode, stdout, stderr


def wait(happened):
    deadline = time.monotonic() + 2 * SOON_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def reports(service, what):
    found = [record for record in list(service.coordinator.members.records) if type(record).__name__ == "MemberReport"]
    return [record for record in found if record.what == what]


def dismiss(service, incarnation=1):
    order = order_to_json(Member(2, incarnation), Dismiss("the test is over"))
    service.coordinator.members.tell(2, json.loads(order))


def test_a_worker_joins_and_says_where_others_reach_it_and_that_it_has_no_state(service, tmp_path):
    with joining(url_of(service), a_token(service), "--name", "alice", folder=tmp_path) as process:
        wait(lambda: reports(service, "registered") or process.poll() is not None)
        known = service.coordinator.members.known[2]
        (registered, *_) = reports(service, "registered") or [None]
        assert registered is not None, process.communicate()
        dismiss(service)
        stdout, stderr = process.communicate(timeout=2 * SOON_S)
    assert process.returncode == 0, stderr
    assert known.name == "alice"
    assert (registered.applied, registered.incarnation) == (None, 1)
    assert registered.address == f"127.0.0.1:{known.port}"
    assert registered.host.startswith("worker-0002.")
    assert "this machine takes part as worker-0002" in stderr
    assert stdout.startswith("worker-0002 has")
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if (path / "plan.json").exists()]
    assert folder.name not in {run_id for _, run_id in processes_of_runs()}


def test_a_worker_that_was_killed_comes_again_under_its_number_with_its_own_token(service, tmp_path):
    with joining(url_of(service), a_token(service), folder=tmp_path) as process:
        wait(lambda: reports(service, "registered") or process.poll() is not None)
        assert process.poll() is None, process.communicate()
    [kept] = (tmp_path / "runs").glob("*/worker.token")
    assert 0o600 == kept.stat().st_mode & 0o777
    options = ("--again", "worker-0002")
    with joining(url_of(service), kept.read_text(), *options, folder=tmp_path) as process:
        wait(lambda: any(one.incarnation == 2 for one in reports(service, "registered")) or process.poll() is not None)
        dismiss(service, incarnation=2)
        _, stderr = process.communicate(timeout=2 * SOON_S)
    assert process.returncode == 0, stderr
    assert "this machine takes part as worker-0002" in stderr
    status, _, stderr = answer_of(url_of(service), kept.read_text(), *options, folder=tmp_path)
    assert (4, "error[R081]: the run refuses: a newer incarnation of worker-0002 has registered") == (
        status,
        next(line for line in stderr.splitlines() if line.startswith("error")),
    )


def test_a_name_that_is_no_worker_is_refused_before_anybody_is_asked(ttlaunch, tmp_path):
    (tmp_path / "token").write_text("abc")
    url = f"https://127.0.0.1:9#{'0' * 64}"
    answer = ttlaunch(f"join {url} --token-file {tmp_path}/token --again worker-34")
    assert (2, "error[P009]: `--again worker-34` is no worker") == (answer.status, answer.stderr.splitlines()[0])


def test_ctrl_c_leaves_after_the_step(service, tmp_path):
    with joining(url_of(service), a_token(service), "--format", "json", folder=tmp_path) as process:
        wait(lambda: reports(service, "registered") or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        wait(lambda: service.coordinator.members.known[2].left)
        dismiss(service)
        stdout, stderr = process.communicate(timeout=2 * SOON_S)
    answer = json.loads(stdout)
    assert (answer["worker_id"], answer["outcome"]) == ("worker-0002", "left"), stderr
    assert process.returncode == 0


def test_another_machine_is_refused_by_name_before_it_touches_the_run(service, here, tmp_path):
    fields = ("release", "recipe", "config", "corpus", "torch", "cpu_capability", "device")
    service.coordinator.fingerprint = lambda: Fingerprint(
        **{**vars(here), **dict.fromkeys(fields, "another"), "threads": 3}
    )
    token = a_token(service)
    status, stdout, stderr = answer_of(url_of(service), token, folder=tmp_path)
    assert (status, stdout) == (4, "")
    named = "release, recipe, config, corpus, torch, cpu_capability, threads, device"
    assert f"error[R083]: this machine differs from the run in {named}, " in stderr
    assert f"the build of torch: `another` in the run, `{here.torch}` here" in stderr
    assert "the number of threads that torch uses: `3` in the run, `1` here" in stderr
    assert service.coordinator.members.known == {}
    assert service.coordinator.tokens.find(token).used_by is None
    assert not (tmp_path / "runs").exists()


def refusal(service, token, folder, url=None):
    status, _, stderr = answer_of(url or url_of(service), token, "--format", "concise", folder=folder)
    assert service.coordinator.members.known == {}
    return status, stderr.strip().splitlines()[-1]


def test_a_token_that_cannot_be_used_is_refused_with_the_reason(service, tmp_path):
    assert refusal(service, "nonesuch", tmp_path) == (4, "error[R081]: the run refuses: this token is unknown")
    expired = invited(service.coordinator, valid_s=1.0, now=time.monotonic() - 5.0)
    assert refusal(service, expired, tmp_path) == (4, "error[R081]: the run refuses: this token has expired")
    revoked = a_token(service)
    service.coordinator.tokens.revoke(service.coordinator.tokens.find(revoked).id)
    assert refusal(service, revoked, tmp_path) == (4, "error[R081]: the run refuses: this token has been revoked")


def test_what_is_no_token_is_refused_without_showing_it(service, tmp_path):
    assert refusal(service, "", tmp_path) == (2, "error[P080]: the token of the invitation is empty")
    status, text = refusal(service, "my other\nsecret", tmp_path)
    assert (status, text) == (2, "error[P080]: the token of the invitation is not one word of letters and digits")


def test_another_run_at_the_address_gets_no_token(service, tmp_path):
    seen = []
    real = service.http.answer
    service.http.answer = lambda request: (seen.append(request.token), real(request))[1]
    status, text = refusal(service, a_token(service), tmp_path, url_of(service, Authority()))
    assert status == 4
    assert text.startswith(f"error[R080]: 127.0.0.1:{service.port} is not the run of the invitation")
    assert seen == [None]


def test_a_run_that_takes_no_workers_now_says_why(service, tmp_path):
    service.coordinator.members.frozen = "the run is about to end"
    assert refusal(service, a_token(service), tmp_path) == (4, "error[R081]: the run refuses: the run is about to end")


def test_an_address_that_is_none_is_refused_before_anybody_is_asked(ttlaunch, tmp_path):
    (tmp_path / "token").write_text("abc")
    answer = ttlaunch(f"join https://127.0.0.1:9#{'a' * 64} --token-file {tmp_path / 'token'} --address 999.1.1.1")
    assert (2, "error[P009]: `--address 999.1.1.1` is no IP address") == (answer.status, answer.stderr.splitlines()[0])
