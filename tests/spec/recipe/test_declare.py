"""What a declaration means: who talks to whom, how many ranks a role has, and what is left of it in the naive form."""

import pytest

from ttlaunch.recipe import Layout, Naive, Recipe, TrainingFile, per
from ttlaunch.spec.recipe.declare import Flow, NeedsProcesses, Pattern, all_pairs, chain, ends, in_columns, in_rows

ROW, STRIDE = per("multihost_config.num_workers"), per("training_config.batch_size", times="training_config.steps")


def always(_config):
    return True


def test_each_helper_declares_its_pattern_with_all_that_it_is_given():
    for helper, pattern in ((chain, Pattern.CHAIN), (ends, Pattern.ENDS), (in_rows, Pattern.ROW)):
        assert Flow("stage", "stage", pattern, row=ROW, stride=STRIDE) == helper("stage", row=ROW, stride=STRIDE)
        assert Flow("stage", "stage", pattern) == helper("stage")
    for helper, pattern in ((ends, Pattern.ENDS), (in_rows, Pattern.ROW), (in_columns, Pattern.COLUMN)):
        assert Flow("stage", "stage", pattern, row=ROW, when=always) == helper("stage", row=ROW, when=always)
    assert Flow("peer", "peer", Pattern.ALL, 1.0) == all_pairs("peer")


OWN_KEYS = {
    "unread": {"unread": ["training_config.step"]},
    "unread section": {"unread": ["training"]},
    "same_on_resume": {"same_on_resume": ["multihost_config.num_worker"]},
    "per": {"layouts": [Layout("all", worker=per("multihost_config.workers"))]},
    "times": {"layouts": [Layout("all", worker=per("multihost_config.num_workers", times="device_config.rank"))]},
    "row": {"flows": [chain("worker", row=per("multihost_config.width"))]},
    "stride": {"flows": [chain("worker", stride=per("multihost_config.width"))]},
    "needs_processes": {"needs_processes": [NeedsProcesses("training_config.x", value=1, instead=2, because="it")]},
    "only": {"naive": Naive([Layout("naive", worker=1)], only={"training_config.x": 1})},
    "naive layout": {"naive": Naive([Layout("naive", worker=per("training_config.x"))])},
}


@pytest.mark.parametrize("declared", OWN_KEYS.values(), ids=OWN_KEYS)
def test_a_declaration_names_only_keys_of_its_configuration(declared):
    given = {"summary": "", "config": TrainingFile, "layouts": [Layout("all", worker=ROW)]}
    Recipe(**given)
    with pytest.raises(ValueError, match=r"` names `[a-z_.]+`, which is no key of the configuration"):
        Recipe(**{**given, **declared})


def test_a_misspelled_key_of_a_declaration_says_which_was_meant():
    with pytest.raises(ValueError, match=r"did you mean `training_config\.steps`"):
        Recipe(summary="", config=TrainingFile, layouts=[Layout("all", worker=ROW)], unread=["training_config.step"])


@pytest.mark.parametrize("key", ["training_config.learning_rate", "training_config.optimizer", "training_config"])
def test_a_number_of_ranks_is_read_from_a_key_that_can_be_one(key):
    with pytest.raises(ValueError, match=f"cannot read a number of ranks from `{key}`"):
        Recipe(summary="", config=TrainingFile, layouts=[Layout("all", worker=per(key))])


def test_a_number_of_ranks_may_be_computed_by_a_property_of_a_section():
    layout = Layout("all", worker=per("device_config.local_ranks"))
    recipe = Recipe(summary="", config=TrainingFile, layouts=[layout])
    assert {"worker": 1} == recipe.layouts[0].counts(TrainingFile())


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_the_weight_of_a_flow_is_a_positive_number(weight):
    with pytest.raises(ValueError, match=f"the weight of a flow is a positive number, not {weight!r}"):
        Flow("a", "b", weight=weight)


def test_under_a_configuration_a_flow_has_numbers():
    config = TrainingFile.model_validate(
        {"multihost_config": {"num_workers": 3}, "training_config": {"batch_size": 5, "steps": 7}}
    )
    flow = chain("stage", row=ROW, stride=STRIDE).under(config)
    assert (3, 35) == (flow.row, flow.stride)
    assert Flow("a", "b", row=4, stride=2) == Flow("a", "b", row=4, stride=2).under(config)
    assert "training_config.batch_size × training_config.steps" == str(STRIDE)


def test_a_layout_knows_its_roles_and_which_of_them_takes_the_other_ranks():
    layout = Layout("all", server=1, peer=None)
    assert ("all", {"server": 1, "peer": None}, "peer") == (layout.name, layout.roles, layout.any_size)
    assert "Layout('all', server, peer)" == repr(layout)
    assert Layout("one", trainer=1).any_size is None


@pytest.fixture
def recipe():
    """Servers and workers, and workers among each other where there are more than one."""
    return Recipe(
        summary="",
        config=TrainingFile,
        layouts=[Layout("apart", worker=ROW, server=1, watcher=1)],
        flows=[
            ("worker", "server"),
            in_rows("worker", row=ROW, when=lambda config: ROW(config) > 1),
            all_pairs("watcher"),
        ],
        traffic=lambda _config, _ranks: [],
        needs_processes=[NeedsProcesses("multihost_config.enabled", value=True, instead=False, because="a group")],
    )


def test_flows_are_those_between_the_roles_that_exist_under_the_configuration(recipe):
    to_server, among_workers, among_watchers = Flow("worker", "server"), recipe.flows[1], all_pairs("watcher")
    assert (to_server, among_workers, among_watchers) == recipe.flows_in(["worker", "server", "watcher"])
    assert (among_workers,) == recipe.flows_in(["worker"])
    alone, three = (TrainingFile.model_validate({"multihost_config": {"num_workers": count}}) for count in (1, 3))
    assert (to_server,) == recipe.flows_in(["worker", "server"], alone)
    assert (to_server, among_workers.under(three)) == recipe.flows_in(["worker", "server"], three)
    assert 3 == recipe.flows_in(["worker"], three)[0].row


def test_the_naive_form_keeps_the_flows_between_its_roles_and_needs_no_processes(recipe):
    plain = recipe.in_naive_form(Naive([Layout("naive", worker=ROW, server=1)]))
    assert [Flow("worker", "server"), recipe.flows[1]] == list(plain.flows)
    assert (None, ()) == (plain.traffic, plain.needs_processes)
    assert ["naive"] == [layout.name for layout in plain.layouts]
    own = recipe.in_naive_form(Naive([Layout("naive", worker=ROW)], flows=[all_pairs("worker")]))
    assert (all_pairs("worker"),) == own.flows_in(["worker"])
