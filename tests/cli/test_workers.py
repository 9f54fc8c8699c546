"""`ttlaunch workers` for a run that is served in this process: listing, inviting, revoking and removing."""

import json

import pytest

from tests.running.membership.memory import FINGERPRINT, MemoryMembers
from tests.running.membership.test_service import DESCRIBED
from ttlaunch import contract
from ttlaunch.records.coordinator import Heartbeat
from ttlaunch.running.agents.certificates import Authority
from ttlaunch.running.membership.service import ListenAddress, listen_on_network, serving
from ttlaunch.running.runs.run_folder import create_run_folder, scratch_folder


@pytest.fixture
def members():
    members = MemoryMembers(planned=2)
    members.register(None, address=("10.0.0.7", 50051), name="alice", have_step=0)
    members.heartbeat(
        2, Heartbeat(incarnation=1, step=41, loss=2.5, tokens_per_s=1234.0, rss=50_000_000), [], wait_s=0.0
    )
    return members


@pytest.fixture
def run(here, members):
    """The folder of a run that takes workers of other machines on loopback."""
    folder, address = create_run_folder(here / "runs"), ListenAddress("127.0.0.1", 0)
    folder.file(contract.PLAN_FILE).write_text("{}")
    with (
        scratch_folder() as scratch,
        serving(
            members,
            described=DESCRIBED,
            fingerprint=lambda: FINGERPRINT,
            authority=Authority(),
            folder=folder,
            scratch=scratch,
            network=(address, listen_on_network(address)),
        ),
    ):
        yield folder


def test_workers_are_listed_with_their_telemetry(ttlaunch, run):
    answer = ttlaunch("workers latest")
    assert answer.status == 0, answer
    assert answer.stdout.splitlines() == [
        "worker       rank  state       step    loss  tokens/s   memory  address         name",
        "worker-0002     0  registered    41  2.5000     1,234  50.0 MB  10.0.0.7:50051  alice",
    ]


def test_json_has_workers_and_invitations(ttlaunch, run):
    answer = json.loads(ttlaunch("workers latest --format json").stdout)
    assert (answer["schema"], answer["run_id"]) == ("ttlaunch.workers/1", run.run_id)
    (worker,) = answer["workers"]
    assert (worker["worker_id"], worker["step"], worker["loss"], worker["memory_bytes"]) == (
        "worker-0002",
        41,
        2.5,
        50_000_000,
    )
    assert answer["invitations"] == []


def test_an_invitation_is_printed_used_by_nobody_and_revoked(ttlaunch, run):
    made = json.loads(ttlaunch("workers latest --invite --valid 60 --format json").stdout)["invitation"]
    assert made["url"].startswith("https://127.0.0.1:")
    assert made["expires_in_s"] == 60.0
    answer = ttlaunch(f"workers latest --revoke {made['id']}")
    assert (answer.status, answer.stdout) == (0, f"invitation {made['id']} is revoked\n")
    (known,) = json.loads(ttlaunch("workers latest --format json").stdout)["invitations"]
    assert (known["id"], known["is_valid"]) == (made["id"], False)
    assert made["token"] not in json.dumps(known)


def test_the_invitation_for_people_is_the_command_of_the_other_machine(ttlaunch, run):
    lines = ttlaunch("workers latest --invite").stdout.splitlines()
    assert lines[0].startswith("invitation ")
    assert lines[2].startswith("ttlaunch join 'https://127.0.0.1:")
    assert lines[4].startswith("It asks for the token: ")


@pytest.mark.parametrize("name", ["worker-0002", "2"])
def test_a_worker_is_asked_to_leave(ttlaunch, run, members, name):
    answer = ttlaunch(f"workers latest --remove {name}")
    assert (answer.status, answer.stdout) == (0, f"{name} leaves after step 42\n")
    assert members.known[2].left


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ("--remove foo", 2, "error[P009]: `foo` is no worker"),
        ("--revoke zzzz", 2, "error[P009]: `zzzz` is no invitation"),
        ("--remove worker-0009", 4, "error[R081]: the run refuses: there is no worker-0009"),
        ("--remove ../../run", 2, "error[P009]: `../../run` is no worker"),
        ("--revoke 00000000", 4, "error[R081]: the run refuses: no invitation has the id `00000000`"),
        ("--revoke a/b", 2, "error[P009]: `a/b` is no invitation"),
        ("--invite --valid 7200", 2, "error[P009]: `--valid 7200`: a token is valid for 1 to 3600 seconds"),
        ("--valid 60", 2, "error[P009]: `--valid` was given without `--invite`"),
        ("--invite --remove 2", 2, "error[P009]: `--remove`, `--invite` and `--revoke` exclude each other"),
    ],
)
def test_what_cannot_be_done_is_refused(ttlaunch, run, options, status, said):
    answer = ttlaunch(f"workers latest {options} --format concise")
    assert (answer.status, answer.stdout) == (status, "")
    assert answer.stderr.startswith(said), answer.stderr


def test_a_run_without_a_coordinator_has_no_such_workers(ttlaunch, here):
    folder = create_run_folder(here / "runs")
    folder.file(contract.PLAN_FILE).write_text("{}")
    answer = ttlaunch("workers latest --format concise")
    expected = (
        f"error[R086]: the run {folder.run_id} has no coordinator: only elastic runs have workers that come and go"
    )
    assert (answer.status, answer.stderr.splitlines()[0]) == (3, expected)


def test_a_run_that_has_ended_has_none(ttlaunch, run):
    run.file(contract.COORDINATOR_FILE).write_text(json.dumps({"socket": str(run.file("no.sock"))}))
    answer = ttlaunch("workers latest --format concise")
    assert answer.stderr.startswith(f"error[R086]: the run {run.run_id} has ended")


def test_a_file_that_names_no_coordinator_is_reported(ttlaunch, run):
    run.file(contract.COORDINATOR_FILE).write_text('{"socket": 3}')
    answer = ttlaunch("workers latest --format concise")
    assert answer.stderr.startswith(
        f"error[P031]: the run {run.run_id} cannot be read: coordinator.json: `socket` is 3"
    )
