"""A gradient that one of three real ranks gets wrong: the run ends with a status of its own, and names the rank (E23)."""

import json

import pytest

from tests.forked import FORKED
from tests.mpi.test_flipped_bits import KEYS

pytestmark = pytest.mark.mpi


@pytest.mark.core
def test_chaos_flips_a_bit_of_a_gradient_and_the_audit_of_the_step_names_the_rank(ttlaunch):
    keys = KEYS | {"training_config.steps": 9, "multihost_config.num_workers": 3, "training_config.audit_interval": 5}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    plan = "flip-gradient rank=1 at step=4"
    answer = ttlaunch(["chaos", "data_parallel", *FORKED, *settings, "--plan", plan, "--format", "json"])
    found = json.loads(answer.stdout)
    assert (0, "named", [1]) == (answer.status, found["faults"][0]["outcome"], found["faults"][0]["ranks"])
    failure = found["report"]["failure"]
    assert ("R089", "audited", 1, 5) == tuple(failure[key] for key in ("code", "class", "rank", "step"))
    assert failure["cause"].endswith("than ranks 0 and 2")
    assert 10 == found["report"]["exit_status"]
