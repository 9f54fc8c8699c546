"""Audits among members that come and go, as real processes: no bit changes, and who computes wrong is named."""

import pytest

from tests.runtime.layouts import watch_records

from .elastic_runs import DATA_PARALLEL, KILL, ElasticRun, in_one_process
from .test_shadowed_servers import CONFIG as OF_SERVERS
from .test_shadowed_servers import TIERS
from .test_shadowed_shards import CONFIG as OF_SHARDS
from .test_shadowed_shards import SHARDS, digest_of

pytestmark = pytest.mark.slow

HOSTS = {number: f"box-{number}" for number in range(9)}
WRONG_ONCE = """
from ttlaunch.runtime.model.model import Model as _Model
_inner = _Model.take_gradients
def _once(model):
    _Model.take_gradients = _inner
    model.grads_N.view(-1)[7] += 1.0
    return _inner(model)
_Model.take_gradients = _once
"""


def audited(config):
    return config | {"training_config": config["training_config"] | {"audit_interval": 2}}


def audits_of(run, *, workers):
    return watch_records(run.folder, workers).audits


@pytest.mark.parametrize(
    ("kind", "config", "first", "faults", "clean"),
    [
        # A member is killed in step 5, so step 5 is the first of an epoch, and step 6 is audited by those that are left.
        pytest.param(DATA_PARALLEL, OF_SERVERS, 3, {(1, "before the step", 5): KILL}, [2, 4, 6, 8, 10], id="replicas"),
        pytest.param(
            TIERS, OF_SERVERS, 4, {(3, "before the step", 4): KILL}, [2], id="servers"
        ),  # then one differentiates
        pytest.param(SHARDS, OF_SHARDS, 3, {}, None, id="shards"),
    ],
)
def test_members_that_audit_each_other_train_the_parameters_of_one_process(
    tmp_path, kind, config, first, faults, clean
):
    expected = in_one_process(tmp_path / "one", config, recipe=kind.folder)[0]
    (tmp_path / "run").mkdir()
    run = ElasticRun(tmp_path / "run", audited(config), first=first, faults=faults, kind=kind)
    try:
        run.finish()
    finally:
        run.close()
    audits = audits_of(run, workers=first)
    assert (expected, None) == (digest_of(run, 0), audits.disputed)
    steps = config["training_config"]["steps"]
    clean = clean or list(range(2, steps + 1, 2))
    assert (len(clean), clean[-1]) == (audits.count, audits.clean)


def test_a_member_that_computes_wrong_is_named_by_its_number_and_no_member_makes_the_step(tmp_path):
    faults = {(2, "before the step", 4): WRONG_ONCE}
    run = ElasticRun(tmp_path, audited(OF_SERVERS), first=3, faults=faults)
    try:
        run.until(lambda run: 1 in run.statuses.values(), may_strand=True)
        run.until(lambda run: audits_of(run, workers=3).disputed is not None, may_strand=True)
    finally:
        run.close()
    judged = audits_of(run, workers=3).judge(HOSTS)
    assert (4, (2,), (0, 1), True) == (judged.block.step, judged.wrong, judged.against, judged.contradicts_itself)
    assert any("computed different gradients of the same micro-batches" in run.output(number) for number in range(3))
