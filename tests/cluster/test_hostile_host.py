"""A host whose owner rewrites what its agent says, behind a real sshd: the run ends in that host's name, and the others' results stand."""

import time

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from tests.security.hostile import piece, raw_frame
from ttlaunch import contract

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

IN_BETWEEN = """\
import os, shutil, subprocess, sys
command = subprocess.Popen(["/bin/sh", "-c", os.environ["SSH_ORIGINAL_COMMAND"]], stdout=subprocess.PIPE)
while some := os.read(command.stdout.fileno(), 65536):
    sys.stdout.buffer.write(some)
    if b"ready" in some:
        sys.stdout.buffer.write(open("/root/lies", "rb").read())
    sys.stdout.buffer.flush()
sys.exit(command.wait())
"""
"""What sshd runs in the place of every command: the command itself, with lies after the greeting of an agent."""

LIES = {
    "a gap of terabytes": piece(contract.stdout_file(1), b"x", offset=2**43),
    "a rank of nobody": piece(contract.stdout_file(999_999_999)),
    "a time of four thousand digits": raw_frame(b'{"kind": "lost_shim", "rank": 1, "time": ' + b"9" * 4000 + b"}"),
}
WORDS = "rank 0 was here"
WORK = f"import os, time\nprint('{WORDS}' if os.environ['TTLAUNCH_RANK'] == '0' else 'hidden', flush=True)\ntime.sleep(600)\n"


ENDED = {
    "kind": "ranks_ended",
    "status": 137,
    "said": "starter on node0 was killed by SIGKILL\nshim of rank 0 was killed by signal 9",
}
ENDS = {
    "once, in the words of another host": contract.pack_frame(ENDED),
    "thousands of times": contract.pack_frame({**ENDED, "status": 0, "said": "x" * 1000}) * 10_000,
}


def hostile(make_cluster, lab, tmp_path, lie, work=WORK):  # noqa: F811 - the fixture
    """Two hosts, the second one of which lies."""
    cluster = make_cluster(hosts=2)
    cluster.path("node1", "/root/in_between.py").write_text(IN_BETWEEN)
    cluster.path("node1", "/root/lies").write_bytes(lie)
    cluster.configure_sshd("node1", ForceCommand="/usr/bin/python3 /root/in_between.py")
    (tmp_path / "work.py").write_text(work)
    lab(cluster.hostfile())
    return cluster


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_host_that_lies_over_ssh_ends_the_run_in_its_name_and_takes_nothing_from_the_others(
    make_cluster,
    ttlaunch_on,
    lab,  # noqa: F811 - the fixture
    tmp_path,
    lie,
):
    cluster = hostile(make_cluster, lab, tmp_path, lie)
    began = time.monotonic()
    answer = ttlaunch_on(cluster)("run --on lab --ranks 2 -- python3 work.py", timeout_s=90)
    assert answer.status in (contract.STATUS_HOST, contract.STATUS_HOST_LOST), answer.stderr
    assert "host node1" in answer.stderr, answer.stderr
    assert "host node0" not in answer.stderr
    assert "Traceback" not in answer.stderr
    assert time.monotonic() - began < 60
    assert WORDS in answer.stdout
    assert [] == list((tmp_path / "runs").rglob("*999999999*"))
    assert [] == [row for row in leftovers(cluster, hosts=["node0"]) if "sshd" not in row[1]]


@pytest.mark.parametrize("lie", ENDS.values(), ids=ENDS)
def test_a_host_that_reports_an_end_of_its_ranks_that_they_have_not_come_to_is_named_and_they_are_ended(
    make_cluster,
    ttlaunch_on,
    lab,  # noqa: F811 - the fixture
    tmp_path,
    lie,
):
    work = WORK.replace("time.sleep(600)", "os.environ['TTLAUNCH_RANK'] == '0' or time.sleep(600)")
    cluster = hostile(make_cluster, lab, tmp_path, lie, work)
    answer = ttlaunch_on(cluster)("run --engine agents --on lab --ranks 2 -- python3 work.py", timeout_s=90)
    assert answer.status != 0
    error = next(line for line in answer.stderr.splitlines() if line.startswith("error"))
    assert "node1" in error, answer.stderr
    assert "node0" not in error
    assert "Traceback" not in answer.stderr
    assert WORDS in answer.stdout
    wait_until(lambda: not [row for row in leftovers(cluster) if "sshd" not in row[1]], what="nothing of the run")
