"""Hosts that cannot be used: what is said about each kind of trouble, word for word."""

import pytest

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.doctor.troubles import explain_troubles


def test_several_unreachable_hosts_are_one_diagnostic_beside_those_that_answered(topology, check):
    errors = [
        HostError("metal-03", Trouble.UNREACHABLE, "connection refused on port 22"),
        HostError("metal-02", Trouble.UNREACHABLE, "connection refused on port 22"),
    ]

    found = explain_troubles(errors, topology=topology(5, user="ttuser"), answered={"metal-01": 0.05, "metal-04": 0.21})

    check(
        found,
        """
        error[H002]: 2 of 5 hosts are not ready; nothing was started
         --> hosts.txt:2:1
          |
        2 | metal-02 slots=1
          | ^^^^^^^^ connection refused on port 22
         --> hosts.txt:3:1
          |
        3 | metal-03 slots=1
          | -------- likewise
          = note: metal-01 and metal-04 answered within 0.2 s

        hint: try it by hand: `ssh -o BatchMode=yes ttuser@metal-02 true`
        """,
    )


def test_an_unknown_name_gets_no_command_that_cannot_work(topology, check):
    error = HostError("metal-01", Trouble.UNKNOWN_NAME, "its name means no address", hints=("correct it",))

    check(
        explain_troubles([error], topology=topology(1)),
        """
        error[H002]: host `metal-01` is not ready; nothing was started
         --> hosts.txt:1:1
          |
        1 | metal-01 slots=1
          | ^^^^^^^^ its name means no address

        hint: correct it
        """,
    )


def test_a_disk_that_is_full_when_a_run_starts_is_a_matter_of_the_disk(topology, check):
    evidence = "the run's folder cannot be made: /home/ttuser/.ttlaunch/runs/1: No space left on device"

    check(
        explain_troubles([HostError("metal-02", Trouble.DISK, evidence)], topology=topology(2)),
        """
        error[H016]: host `metal-02` cannot hold the files of a run; nothing was started
         --> hosts.txt:2:1
          |
        2 | metal-02 slots=1
          | ^^^^^^^^ the run's folder cannot be made: /home/ttuser/.ttlaunch/runs/1: No space left on device

        hint: `ssh metal-02 df -h '~/.ttlaunch' /dev/shm`: is one of them full, or read-only?

        hint: `remote_folder:` in cluster.yaml chooses another place
        """,
    )


def test_different_troubles_are_different_diagnostics_in_the_order_of_the_hostfile(topology):
    errors = [
        HostError("metal-03", Trouble.LOGIN, "every key refused"),
        HostError("metal-02", Trouble.CHANGED_KEY, "its key is SHA256:new"),
        HostError("metal-01", Trouble.UNREACHABLE, "no answer within 5 s"),
    ]

    found = explain_troubles(errors, topology=topology(4))

    assert [
        ("H002", "host `metal-01` is not ready; nothing was started"),
        ("H010", "host `metal-02` has another host key than the known one; nothing was started"),
        ("H011", "host `metal-03` refuses the login; nothing was started"),
    ] == [(one.code, one.message) for one in found]


@pytest.mark.parametrize(
    ("trouble", "code", "one", "two"),
    [
        (Trouble.SILENT, "H002", "is not ready", "are not ready"),
        (
            Trouble.UNKNOWN_KEY,
            "H009",
            "has a host key that is not known here",
            "have host keys that are not known here",
        ),
        (Trouble.LOGIN, "H011", "refuses the login", "refuse the login"),
        (Trouble.SETTINGS, "H012", *["cannot be reached with the ssh settings here"] * 2),
        (Trouble.LOST, "H013", *["did not answer our questions to the end"] * 2),
        (Trouble.TIMED_OUT, "H013", *["did not answer our questions to the end"] * 2),
        (Trouble.SCRIPT, "H013", *["did not answer our questions to the end"] * 2),
        (Trouble.NO_PYTHON, "H014", "has no Python that can be used", "have no Python that can be used"),
    ],
)
def test_every_trouble_has_a_code_and_a_sentence(topology, trouble, code, one, two):
    single = explain_troubles([HostError("metal-01", trouble, "so it is")], topology=topology(3))
    both = [HostError(name, trouble, "so it is") for name in ("metal-01", "metal-02")]

    assert [(code, f"host `metal-01` {one}; nothing was started")] == [(d.code, d.message) for d in single]
    assert [(code, f"2 of 3 hosts {two}; nothing was started")] == [
        (d.code, d.message) for d in explain_troubles(both, topology=topology(3))
    ]


def test_every_kind_of_trouble_can_be_explained(topology):
    for trouble in Trouble:
        assert explain_troubles([HostError("metal-01", trouble, "x")], topology=topology(1))


def test_evidence_and_hints_of_the_connection_are_kept_and_said_once(topology):
    notes, hints = ("tried: agent, id_ed25519",), ("`ssh-copy-id metal-01`",)
    errors = [HostError(f"metal-0{n}", Trouble.LOGIN, "no key\nfits", notes=notes, hints=hints) for n in (1, 2)]

    found = explain_troubles(errors, topology=topology(2, port=2222, identity_file="~/.ssh/lab"))[0]

    assert found.primary is not None
    assert "no key\\nfits" == found.primary.text
    assert notes == found.notes
    assert hints == found.hints


def test_many_hosts_are_not_all_drawn(topology):
    errors = [HostError(f"metal-0{n}", Trouble.UNREACHABLE, "no answer within 5 s") for n in range(1, 10)]

    found = explain_troubles(errors, topology=topology(9))[0]

    assert 7 == len(found.secondary)
    assert ("metal-09 likewise",) == found.notes


def test_the_command_to_try_by_hand_is_said_for_one_host_and_uses_the_settings(topology):
    errors = [HostError(f"metal-0{n}", Trouble.UNREACHABLE, "no route") for n in (1, 2)]
    own = [
        HostError(f"metal-0{n}", Trouble.UNREACHABLE, "no route", hints=(f"try it by hand: `ssh metal-0{n}`",))
        for n in (1, 2)
    ]

    found = explain_troubles(errors, topology=topology(2, port=2222, identity_file="~/.ssh/lab"))[0]

    assert ("try it by hand: `ssh -o BatchMode=yes -p 2222 -i ~/.ssh/lab metal-01 true`",) == found.hints
    assert ("try it by hand: `ssh metal-01`",) == explain_troubles(own, topology=topology(2))[0].hints
