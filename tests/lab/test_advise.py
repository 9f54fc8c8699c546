"""`ttlaunch advise`: which form of a training is the quickest on a cluster, within its memory, and why (E24)."""

import json
import shlex
from dataclasses import replace

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.predict import NotPredicted
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.advice_view import advice_line, parse_fits, render_ranking
from ttlaunch.diagnostics import LaunchError
from ttlaunch.lab.advise import advise
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, StepTime, VirtualRun, read_result
from ttlaunch.records.parser import read
from ttlaunch.records.virtual import VirtualOrder
from ttlaunch.running.metrics.prediction import PredictedRank, Prediction
from ttlaunch.running.runs.run_folder import write_plan
from ttlaunch.runtime.virtual import run_virtually
from ttlaunch.runtime.work import UPDATE_S
from ttlaunch.runtime.world import read_world

MB = 10**6
BLOCKS, WIDTH, LENGTH, MICRO_BATCHES = 2, 32, 16, 4
TRAINING = f"""\
training_config: {{batch_size: {MICRO_BATCHES}, micro_batch_size: 1, validation_sequences: 2, validation_interval: 1000}}
transformer_config: {{num_blocks: {BLOCKS}, num_heads: 2, embedding_dim: {WIDTH}, max_sequence_length: {LENGTH}}}
checkpoint_config: {{interval: null}}
"""


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    file = tmp_path_factory.mktemp("training") / "train.yaml"
    file.write_text(TRAINING)
    return RunSpec(None, config_file=str(file), ranks=2)


@pytest.fixture(scope="module")
def ranking(training):
    """All forms, each of which takes equally long."""
    return advise(training, Conditions(), Unattended(), simulate=made_up({}), foresee=None)


def made_up(times):
    """Results without a simulation: a step takes what `times` says of the recipe, half of it for messages."""

    def simulate(orders, *, done):
        done(len(orders))
        return [result(plan, conditions, times.get(plan.program.name, 100.0)) for plan, conditions in orders]

    return simulate


def result(plan, conditions, step_ms):
    step_ms /= plan.world_size
    one = StepTime(
        ((0, plan.world_size - 1),), "x", 3, step_ms, 0.3 * step_ms, 0.5 * step_ms, 0.2 * step_ms, (step_ms,)
    )
    return VirtualRun(plan, conditions, (one,), step_ms, (), 0, 0, 0, None, None)


def in_this_process(*recipes, tmp_path):
    """The simulation itself, of some recipes."""

    def simulate(orders, *, done):
        found = []
        for number, (plan, conditions) in enumerate(orders):
            if plan.program.name not in recipes or "gpipe" in str(plan.as_json()["config"]):
                found.append(LaunchError([*_untried()]))
                continue
            write_plan(plan, tmp_path / f"plan-{number}")
            order = read(VirtualOrder, conditions.order(plan))
            answer = run_virtually(read_world(tmp_path / f"plan-{number}" / "plan.json"), order)
            found.append(read_result(plan, conditions, json.dumps(answer).encode()))
            done(number)
        return found

    return simulate


def _untried():
    with pytest.raises(LaunchError) as refused:
        parse_fits(["not tried in this test"])
    return refused.value.diagnostics


def step_ms(recipe, *, compute_s, link_us, link_gbps):
    """The time of a step of two ranks in milliseconds, by hand, where messages and passes do not overlap."""
    values = 256 * WIDTH * 2 + LENGTH * WIDTH + BLOCKS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH
    gradient_s = 4 * values / (link_gbps * 1e9 / 8)
    latency_s = link_us / 1e6
    if (
        recipe == "pipeline_parallel"
    ):  # half of the model each, the fill of one stage, and each activation there and back
        activation_s = 4 * LENGTH * WIDTH / (link_gbps * 1e9 / 8) + latency_s
        return 1e3 * ((MICRO_BATCHES + 1) / 2 * compute_s + 2 * MICRO_BATCHES * activation_s)
    # Halves of the gradient are exchanged, and their sums come back; local steps do so with the weights, in one step of eight.
    exchange_s = gradient_s + 2 * latency_s
    every = 8 if recipe == "local_sgd" else 1
    return 1e3 * (MICRO_BATCHES / 2 * compute_s + UPDATE_S * values + exchange_s / every)


@pytest.mark.parametrize(
    ("conditions", "tried", "first", "first_with_same_bits"),
    [
        (
            Conditions(compute_ms=2, link_us=50_000, link_gbps=10),
            ("data_parallel", "pipeline_parallel", "local_sgd"),
            "local_sgd",
            "data_parallel",
        ),
        (
            Conditions(compute_ms=2, link_us=10, link_gbps=0.01),
            ("data_parallel", "pipeline_parallel"),
            "pipeline_parallel",
            "pipeline_parallel",
        ),
    ],
    ids=["late links", "slow links"],
)
def test_the_recipe_that_costs_least_by_hand_comes_first(
    training, tmp_path, conditions, tried, first, first_with_same_bits
):
    found = advise(training, conditions, Unattended(), simulate=in_this_process(*tried, tmp_path=tmp_path))
    given = {"compute_s": conditions.compute_ms / 1e3, "link_us": conditions.link_us, "link_gbps": conditions.link_gbps}
    by_hand = {recipe: step_ms(recipe, **given) for recipe in tried}

    assert sorted(by_hand, key=by_hand.get) == [one.form.recipe for one in found.ranked]
    assert first == found.ranked[0].form.recipe
    assert first_with_same_bits == next(one.form.recipe for one in found.ranked if one.has_same_bits)
    assert "communication" == found.ranked[0].dominant
    assert found.ranked[0].why.startswith("communication takes ")
    for one in found.ranked:
        assert by_hand[one.form.recipe] == pytest.approx(one.slowest.step_ms, rel=0.5)


def test_a_step_counts_all_that_arrives_in_it(training, tmp_path):
    """Sharded weights arrive in the step after the one that has changed them: the first step has only half of the messages."""
    found = advise(
        training,
        Conditions(compute_ms=0.1, link_us=10, link_gbps=0.001),
        Unattended(),
        simulate=in_this_process("data_parallel", "zero", tmp_path=tmp_path),
    )
    times = {one.form.values[0]: one.slowest.step_ms for one in found.ranked}
    assert times["zero_config.stage=1"] == pytest.approx(times["multihost_config.num_workers=2"], rel=0.03)
    assert {2} == {one.slowest.steps for one in found.ranked}


def test_a_slow_rank_is_none_of_a_form_that_does_not_have_it(training):
    asked = []

    def simulate(orders, *, done):
        asked.extend(orders)
        return made_up({})(orders, done=done)

    advise(
        replace(training, ranks=None), Conditions(slow={1: 2.0}, slow_link={1: 3.0}), Unattended(), simulate=simulate
    )
    assert {1, 2} <= {plan.world_size for plan, _ in asked}
    for plan, conditions in asked:
        named = {} if plan.world_size < 2 else {1: 2.0}
        assert (named, dict.fromkeys(named, 3.0)) == (conditions.slow, conditions.slow_link)
    with pytest.raises(LaunchError, match="names rank 99"):
        advise(training, Conditions(slow_link={99: 2.0}), Unattended(), simulate=simulate)


def room(**needed):
    """Predict that each rank of a recipe holds so many megabytes of tensors, beside 100 of libraries."""

    def foresee(plan):
        ranks = [
            PredictedRank(row.rank, row.role, {}, needed.get(plan.program.name, 9000) * MB, {}, {}, 0)
            for row in plan.ranks
        ]
        return Prediction(100 * MB, tuple(ranks), (), None)

    return foresee


def test_what_does_not_fit_stands_behind_what_does_and_says_by_how_much_and_where(training):
    """16 bytes of each of 50 million values are 800 MB; ZeRO 3 holds half of them, and is a little slower."""
    quick = made_up({"data_parallel": 10.0, "zero": 12.0, "pipeline_parallel": 30.0})
    found = advise(
        training,
        Conditions(),
        Unattended(),
        top=1,
        limits={"": 1600 * MB},
        simulate=quick,
        foresee=room(data_parallel=800, zero=400),
    )
    last = found.ranked[-1]

    assert ("zero", True) == (found.ranked[0].form.recipe, found.ranked[0].fits)
    assert ("data_parallel", False) == (last.form.recipe, last.fits)
    both = 2 * (int(1.03 * 905_800_000) + 10 * MB)
    assert f"does not fit by {both - 1600 * MB:,} bytes on rank 0 of localhost" == last.why
    assert {None} == {one.fits for one in found.ranked[1:-1]}  # nobody needs to know
    assert {"localhost": both} == last.needed
    table = render_ranking(found, top=1)
    assert any(line.split()[:2] == ["–", "data_parallel"] for line in table)
    assert any(line == f"1: {found.ranked[0].command}" for line in table)


def test_only_memory_that_is_asked_for_is_predicted(ranking):
    assert {None} == {one.fits for one in ranking.ranked}
    assert any("--fits 24GB" in line for line in render_ranking(ranking, top=3))


def test_where_nothing_fits_no_command_is_given(training):
    given = {"limits": {"": 1}, "simulate": made_up({}), "foresee": room()}
    found = advise(training, Conditions(), Unattended(), only_same_bits=True, **given)
    lines = render_ranking(found, top=2)
    assert {False} == {one.fits for one in found.ranked}
    assert "note  no form fits into the memory of these hosts" in lines
    assert not any("ttlaunch run" in line for line in lines)


def test_a_form_whose_memory_is_not_known_says_why(training):
    found = advise(
        training,
        Conditions(),
        Unattended(),
        top=1,
        limits={"": 1},
        simulate=made_up({}),
        foresee=lambda _plan: NotPredicted("nobody knows"),
    )
    assert (None, "nobody knows") == (found.ranked[0].fits, found.as_json()["ranked"][0]["not_predicted"])


def test_each_command_makes_the_form_that_was_simulated(ranking):
    assert {"zero", "pipeline_parallel", "tensor_parallel", "sync_ps", "hierarchical_parallel"} <= {
        one.form.recipe for one in ranking.ranked
    }
    for one in ranking.ranked:
        _, verb, recipe, *words = shlex.split(one.command)
        given = dict(zip(words[::2], words[1::2], strict=True))
        overrides = tuple(value for name, value in zip(words[::2], words[1::2], strict=True) if name == "--set")
        spec = RunSpec(recipe, config_file=given["-c"], ranks=int(given["--ranks"]), overrides=overrides)
        assert ("run", one.found.plan.hash) == (verb, plan_simulation(spec, Unattended()).hash)


def test_a_file_with_sections_of_one_recipe_trains_the_same_with_the_others(tmp_path):
    """Its commands name no file that the recipe would refuse."""
    file = tmp_path / "train.yaml"
    file.write_text(TRAINING + "zero_config: {stage: 2}\nmultihost_config: {num_workers: 2}\n")
    found = advise(RunSpec(None, config_file=str(file), ranks=2), Conditions(), Unattended(), simulate=made_up({}))
    assert "zero" == found.recipe
    tensor = next(one for one in found.ranked if one.form.recipe == "tensor_parallel")
    assert "-c" not in shlex.split(tensor.command)
    config = tensor.found.plan.as_json()["config"]
    assert (WIDTH, 2) == (config["transformer_config"]["embedding_dim"], config["tensor_parallel_config"]["ranks"])


def test_all_that_cannot_run_is_named_with_its_reason(ranking):
    refused = {(one["recipe"], one["reason"]) for one in ranking.as_json()["refused"]}
    assert ("elastic_dp", "its server updates after each gradient, so it has no steps of the global batch") in refused
    assert ("pipeline_parallel", "stage 0 has 1 block, which 2 equal chunks cannot share") in refused
    assert "fully_sharded" in {recipe for recipe, _ in refused}


def test_forms_with_other_bits_can_be_left_out(training):
    found = advise(training, Conditions(), Unattended(), simulate=made_up({}), only_same_bits=True)
    assert {"local_sgd", "diloco", "tensor_parallel"}.isdisjoint(one.form.recipe for one in found.ranked)
    assert ("local_sgd", "its bits are not those of the training") in {
        (one.recipe, one.reason) for one in found.refused
    }


def test_a_cluster_with_bindings_has_one_number_of_ranks():
    found = advise(RunSpec("data_parallel", on="2loudboxes"), Conditions(), Unattended(), simulate=made_up({}))
    assert {2} == {one.form.ranks for one in found.ranked}
    assert all("--on 2loudboxes" in one.command for one in found.ranked)
    place, recipe, *_ = advice_line(1, found.ranked[0])
    assert (1, found.ranked[0].form.recipe) == (place, recipe)


def test_the_memory_of_one_host_may_differ():
    assert {"": 24 * 10**9, "metal-3": 8 * 10**9} == parse_fits(["24GB", "metal-3=8GB"])
    with pytest.raises(LaunchError, match="names no host"):
        advise(RunSpec("zero", on="2loudboxes"), Conditions(), Unattended(), limits={"nobody": 1})


@pytest.mark.parametrize("texts", [["24"], ["a=b"], ["1GB", "2GB"], ["a=1GB", "a=2GB"]])
def test_memory_that_makes_no_sense_is_refused(texts):
    with pytest.raises(LaunchError) as refused:
        parse_fits(texts)
    assert ["P009"] == [one.code for one in refused.value.diagnostics]
