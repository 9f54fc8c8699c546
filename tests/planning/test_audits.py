"""`--audit 1/K`: what it sets, what it costs, and what is refused by name before anything starts."""

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import LaunchError
from ttlaunch.planning.audits import cost_of_audits
from ttlaunch.spec.recipe.traffic import audit_traffic


def refused(recipe, audit="1/5", **more):
    with pytest.raises(LaunchError) as caught:
        prepare(RunSpec(recipe, audit=audit, **more), Unattended())
    return [(one.code, one.message) for one in caught.value.diagnostics if one.severity == "error"]


def test_the_share_becomes_the_interval_of_the_configuration_and_the_plan_says_what_it_costs(ttlaunch):
    resolved = resolve(RunSpec("data_parallel", audit="1/50"))
    assert 50 == resolved.choice.loaded.config.training_config.audit_interval
    assert f"audits  {cost_of_audits(50)}" in ttlaunch("plan data_parallel --audit 1/50").stdout.splitlines()
    assert "in every 50th step each worker also computes" in cost_of_audits(50)
    assert "about 2 % of the time" in cost_of_audits(50)


@pytest.mark.parametrize("recipe", ["data_parallel", "hierarchical_parallel", "sync_ps"])
def test_workers_of_a_run_with_audits_have_a_flow_and_others_have_none(recipe):
    resolved = resolve(RunSpec(recipe, audit="1/2", overrides=["multihost_config.num_workers=3"]))
    assert ("worker", "worker") in [(flow.source, flow.target) for flow in resolved.layout.flows]
    moved = audit_traffic(resolved.choice.loaded.config, [0, 1, 2])
    assert (6, {72}, {2}) == (len(moved), {one.per_step for one in moved}, {one.every for one in moved})
    plain = resolve(RunSpec(recipe))
    flows = [flow for flow in plain.layout.flows if flow.source == flow.target == "worker"]
    assert (recipe == "data_parallel") == bool(flows)
    assert [] == audit_traffic(plain.choice.loaded.config, [0, 1, 2])


@pytest.mark.parametrize("text", ["5", "1/0", "2/5", "1/", "0.2", "1/5 ", "-1/5", "1/9999999999"])
def test_what_is_no_share_is_refused(text):
    assert [("P009", f"`--audit {text}` is not 1/K")] == refused("data_parallel", text)


@pytest.mark.parametrize(
    "recipe",
    ["classic_dp", "diloco", "elastic_dp", "fully_sharded", "local_sgd", "pipeline_parallel", "tensor_parallel"],
)
def test_recipes_that_cannot_be_audited_are_refused_by_name(recipe):
    message = f"`--audit` lets ranks check each other's gradients, and those of {recipe} cannot"
    assert [("P089", message)] == refused(recipe)


@pytest.mark.parametrize(
    ("recipe", "override", "said"),
    [
        (
            "zero",
            "zero_config.stage=3",
            "`zero_config.stage` is `3`; ranks of zero can check each other's gradients only",
        ),
        ("data_parallel", "data_parallel_config.reduction=fast", "`data_parallel_config.reduction` is `fast`"),
        ("data_parallel", "compression_config.kind=int8", "`compression_config.kind` is `int8`"),
        ("sync_ps", "sync_ps_config.straggler=drop", "`sync_ps_config.straggler` is `drop`"),
    ],
)
def test_values_with_which_a_recipe_cannot_be_audited_are_named(recipe, override, said):
    [(code, message)] = refused(recipe, overrides=[override])
    assert ("P089", True) == (code, message.startswith(said))


def test_a_single_rank_and_a_naive_form_are_refused():
    alone = "an audit needs two ranks that differentiate, and this run has one"
    assert [("P089", alone)] == refused("data_parallel", ranks=1)
    assert ["C090"] == [code for code, _ in refused("data_parallel", naive=True)]


@pytest.mark.parametrize("recipe", ["data_parallel", "hierarchical_parallel", "sync_ps", "zero"])
def test_members_of_an_elastic_run_audit_each_other_in_the_recipes_whose_ranks_do(recipe):
    stage = ["zero_config.stage=2"] if recipe == "zero" else []
    resolved = resolve(RunSpec(recipe, audit="1/5", elastic="3:4", overrides=stage))
    assert [] == [one.message for one in resolved.diagnostics if one.severity == "error"]
    assert {resolved.choice.recipe.audited.role} == set(resolved.layout.roles)


@pytest.mark.parametrize(("recipe", "bounds"), [("classic_dp", "1:2"), ("diloco", "1:2"), ("elastic_dp", "2:3")])
def test_members_of_other_recipes_are_refused(recipe, bounds):
    assert "P089" in [code for code, _ in refused(recipe, elastic=bounds)]


def test_shards_that_no_member_has_as_a_whole_are_refused_by_their_key():
    said = refused("zero", elastic="2:3", overrides=["zero_config.stage=3"])
    assert [("P089", True)] == [(code, message.startswith("`zero_config.stage` is `3`")) for code, message in said]


def test_a_program_has_no_audits(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)\n", encoding="utf-8")
    [(_, message)] = refused(str(script))
    assert message.startswith("`--audit` configures recipes; ")
