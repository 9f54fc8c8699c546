"""`ttlaunch hosts`: the hosts of an allocation as a hostfile that other commands take."""

import json

import pytest

SLURM = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}


@pytest.fixture
def in_job(monkeypatch):
    """`in_job(variables)`: the command runs with the variables of a job."""

    def enter(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return enter


def test_the_hosts_of_a_slurm_job_are_printed_as_a_hostfile(ttlaunch, in_job):
    in_job(SLURM)
    expected = """\
# Hosts of an allocation by Slurm, read from SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE.
node1 slots=2
node2 slots=2
node3 slots=1
"""
    assert (0, expected, "") == tuple(
        getattr(ttlaunch("hosts --from slurm"), key) for key in ("status", "stdout", "stderr")
    )


def test_a_plan_over_the_written_hostfile_fills_the_hosts_in_slurms_order(ttlaunch, here, in_job):
    in_job(SLURM)
    assert 0 == ttlaunch("hosts --from slurm --out hosts.txt").status
    answer = ttlaunch("plan --hostfile hosts.txt --ranks 5 --format json -- sh -c true")
    assert 0 == answer.status, answer.stderr
    assert ["node1", "node1", "node2", "node2", "node3"] == [row["host"] for row in json.loads(answer.stdout)["ranks"]]


def test_an_existing_file_is_kept_without_force(ttlaunch, here, in_job):
    in_job(SLURM)
    (here / "hosts.txt").write_text("mine\n")
    assert 2 == ttlaunch("hosts --from slurm --out hosts.txt").status
    assert "mine\n" == (here / "hosts.txt").read_text()
    assert 0 == ttlaunch("hosts --from slurm --out hosts.txt --force").status
    assert "node3 slots=1" in (here / "hosts.txt").read_text()


def test_a_hostfile_of_the_mpi_operator_is_read_from_standard_input_too(ttlaunch, here):
    text = "pi-worker-0.pi.default.svc:4\n"
    (here / "hostfile").write_text(text)
    answers = [ttlaunch("hosts --from k8s -", stdin=text), ttlaunch("hosts --from k8s hostfile")]
    assert [True] * 2 == [answer.stdout.endswith("\npi-worker-0.pi.default.svc slots=4\n") for answer in answers]


def test_the_example_of_p054_shows_it(ttlaunch, in_job):
    in_job({"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_TASKS_PER_NODE": "2(x2)"})
    answer = ttlaunch("hosts --from slurm --format json")
    assert (3, ["P054"]) == (answer.status, [one["code"] for one in json.loads(answer.stdout)["diagnostics"]])
    assert "SLURM_JOB_NODELIST='node[1-3]' SLURM_TASKS_PER_NODE='2(x2)'" in ttlaunch("explain P054").stdout


@pytest.mark.parametrize(
    "line",
    [
        "--from slurm",
        "--from k8s",
        "--from ray",
        "--from nope",
        "--from ray nope.json",
        "--from slurm FILE",
        "--from k8s .",
    ],
)
def test_a_mistake_on_the_command_line_ends_with_status_2(ttlaunch, here, line):
    assert 2 == ttlaunch(f"hosts {line}").status
    assert [] == list(here.iterdir())


def test_an_annotation_names_no_file_for_a_mistake_in_a_variable(ttlaunch, in_job):
    in_job({"SLURM_JOB_NODELIST": "node[", "SLURM_TASKS_PER_NODE": "1"})
    answer = ttlaunch("hosts --from slurm --format github")
    assert (3, True) == (answer.status, answer.stderr.startswith("::error title=T014::"))
