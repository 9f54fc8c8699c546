"""`ttlaunch chaos` over real hosts: a shim is killed there, a cable is cut, and every host is asked what is left."""

import json

import pytest

from tests.cluster.test_run import lab  # noqa: F401 - a fixture

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

WAIT = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
FAULTS = {
    "kill shim=1 at 1s": ("R006", 1, "node1"),
    "cut host=node1 at 1s": ("R012", None, "node1"),
}


@pytest.fixture(scope="module")
def cluster2(_hosts_can_start):
    from tests.cluster.hosts import Cluster  # noqa: PLC0415 - needs root

    with Cluster(hosts=2) as cluster:
        yield cluster


@pytest.mark.parametrize("plan", FAULTS)
def test_a_fault_on_a_host_is_named_and_nothing_is_left_on_any(cluster2, ttlaunch_on, lab, tmp_path, plan):  # noqa: F811
    code, rank, host = FAULTS[plan]
    (tmp_path / "wait.py").write_text(WAIT)
    lab(cluster2.hostfile())
    line = f'chaos --on lab --ranks 2 --lease 5 --format json --plan "{plan}" -- python3 wait.py'
    answer = ttlaunch_on(cluster2)(line, timeout_s=80)
    assert answer.stdout, answer.stderr
    found = json.loads(answer.stdout)
    assert (0, []) == (answer.status, found["diagnostics"]), found
    failure = found["report"]["failure"]
    assert (code, rank, host) == (failure["code"], failure["rank"], failure["host"])
    assert found["faults"][0]["detected_s"] < 10.0
    assert ["this machine", "node0", "node1"] == [one["host"] for one in found["left"]]
    assert [] == [one for one in found["left"] if one["clean_after_s"] is None]
