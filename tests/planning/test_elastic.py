"""`--elastic MIN:MAX`: the rows of the plan, the transport, and what is refused by name."""

import json
from pathlib import Path

import pytest

from ttlaunch.recipe import Elastic
from ttlaunch.spec.recipe.discovery import find_recipe, list_recipes, load_recipe


def plan_of(ttlaunch, arguments):
    answer = ttlaunch(f"plan {arguments} --format json")
    assert 0 == answer.status, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize(("ranks", "each"), [(1, 16), (4, 16), (8, 16)])
def test_rows_for_workers_that_replace_others_follow_the_first_ones_with_their_places(ttlaunch, ranks, each):
    plan = plan_of(ttlaunch, f"data_parallel -n {ranks} --elastic 1:8")
    limits = {"minimum": 1, "maximum": 8, "micro_batches": 8, "first": ranks, "kept_bytes": 4}
    assert limits == plan["elastic"]
    rows = plan["ranks"]
    assert [rank >= ranks for rank in range(ranks * (1 + each))] == [row.get("later", False) for row in rows]
    places = [(row["host"], row["slot"], row["role"]) for row in rows]
    assert places == places[:ranks] * (1 + each)
    assert "data_parallel" == plan["layout"]  # also with one worker: the layout of one process has no workers


@pytest.mark.parametrize("bound", [0, 2])
def test_workers_of_a_ring_come_and_go_in_the_ring_also_if_one_begins(ttlaunch, bound):
    plan = plan_of(ttlaunch, f"classic_dp -n 1 --elastic 1:2 --set classic_dp_config.staleness_bound={bound}")
    assert ("ring", {"worker"}) == (plan["layout"], {row["role"] for row in plan["ranks"]})


def test_tiers_that_come_and_go_have_one_role_and_two_of_them_keep_the_state(ttlaunch):
    plan = plan_of(ttlaunch, "hierarchical_parallel -n 5 --elastic 3:6")
    assert {
        "minimum": 3,
        "maximum": 6,
        "micro_batches": 8,
        "first": 5,
        "slots": 1,
        "servers": 2,
        "shadow_bytes": 8,
    } == plan["elastic"]
    assert ("members", {"member"}) == (plan["layout"], {row["role"] for row in plan["ranks"]})
    assert 3 == plan["config"]["multihost_config"]["num_workers"]
    fixed = plan_of(ttlaunch, "hierarchical_parallel -n 4")  # a layout of elastic runs is none of other runs
    assert "three_tier" == fixed["layout"]


@pytest.mark.parametrize(("servers", "least", "kept"), [(1, 2, 12), (2, 3, 16)])
def test_parameter_servers_that_come_and_go_are_members_beside_the_workers(ttlaunch, servers, least, kept):
    given = f"sync_ps -n 4 --elastic {least}:4 --set sync_ps_config.num_servers={servers}"
    plan = plan_of(ttlaunch, given)
    limits = {"minimum": least, "maximum": 4, "micro_batches": 8, "first": 4, "slots": servers, "servers": servers}
    limits["shadow_bytes"] = kept  # moments and average; with two servers the weights, too
    assert limits == plan["elastic"]
    assert ({"member"}, 4 - servers) == (
        {row["role"] for row in plan["ranks"]},
        plan["config"]["multihost_config"]["num_workers"],
    )


def test_workers_that_come_and_go_talk_over_grpc_and_the_engine_is_agents(ttlaunch):
    plan = plan_of(ttlaunch, "data_parallel -n 2 --elastic 1:2")
    assert ("grpc", "agents") == (plan["config"]["multihost_config"]["socket_type"], plan["engine"]["name"])
    fixed = plan_of(ttlaunch, "data_parallel -n 2")
    assert "elastic" not in fixed
    assert 2 == len(fixed["ranks"])


def test_the_plan_that_is_shown_names_workers_beyond_the_maximum(ttlaunch):
    shown = ttlaunch("plan data_parallel -n 4 --elastic 1:2").stdout
    line = "elastic  4 workers start: 2 spares without work until one of the others ends or leaves"
    assert line in shown.splitlines()
    assert "spare" not in ttlaunch("plan data_parallel -n 2 --elastic 1:2").stdout


def test_more_workers_than_micro_batches_may_start_as_spares(ttlaunch):
    lines = ttlaunch("plan zero -n 10 --elastic 1:8").stdout.splitlines()
    assert "elastic  10 workers start: 2 spares without work until one of the others ends or leaves" in lines
    [shadows] = [line for line in lines if "as a shadow" in line]
    assert "16 / W bytes of each parameter, 2.0 with 8 workers" in shadows


def test_the_plan_that_is_shown_has_the_first_rows_and_says_how_many_more_can_start(ttlaunch):
    lines = ttlaunch("plan data_parallel -n 2 --elastic 1:2").stdout.splitlines()
    assert "data_parallel (data_parallel) on local: 2 ranks on 1 host, agents" == lines[0]
    assert "elastic  1 to 2 workers make a step; 32 more can start, each in place of one that has ended" in lines
    assert 2 == len([line for line in lines if " worker " in line and "localhost" in line])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "fully_sharded --elastic 1:2",
            "error[P074]: `--elastic` lets workers come and go, and those of fully_sharded have to stay: torch shares",
        ),
        (
            "data_parallel --elastic 1:2 --set data_parallel_config.reduction=fast",
            "error[P074]: `data_parallel_config.reduction` is `fast`; workers of data_parallel come and go only with `canonical`",
        ),
        (
            "data_parallel --elastic 1:2 --set compression_config.kind=int8",
            "error[P074]: `compression_config.kind` is `int8`",
        ),
        (
            "data_parallel --elastic 1:2 --set multihost_config.socket_type=mpi",
            "error[P074]: `multihost_config.socket_type` is `mpi`; workers of data_parallel come and go only with `grpc`",
        ),
        (
            "local_sgd --elastic 1:2 --set compression_config.kind=int8",
            "error[P074]: `compression_config.kind` is `int8`; workers of local_sgd come and go only with `none`",
        ),
        (
            "diloco --elastic 1:2 --set training_config.early_stop_patience=3",
            "error[P074]: `training_config.early_stop_patience` is `3`; workers of diloco come and go only with `null`",
        ),
        ("data_parallel --elastic 1:9", "error[P074]: `--elastic 1:9`: a step has 8 micro-batches, so at most as many"),
        (
            "hierarchical_parallel --elastic 1:4",
            "error[P074]: `--elastic 1:4`: 2 workers of a step keep the optimizer's state, so it needs one more at least",
        ),
        (
            "hierarchical_parallel --elastic 3:11",
            "error[P074]: `--elastic 3:11`: a step has 8 micro-batches, so at most as many workers make it beside 2 servers",
        ),
        (
            "hierarchical_parallel --elastic 3:4 --set device_config.enable_ddp=true --set 'device_config.mesh_shape=[1, 2]'",
            "error[P074]: `device_config.enable_ddp` is `True`; workers of hierarchical_parallel come and go only with `False`",
        ),
        (
            "sync_ps --elastic 1:4",
            "error[P074]: `--elastic 1:4`: 1 worker of a step keeps the optimizer's state, so it needs one more at least",
        ),
        (
            "sync_ps --elastic 4:5 --set sync_ps_config.num_servers=3 --set multihost_config.num_workers=2",
            "error[P074]: `sync_ps_config.num_servers` is `3`; workers of sync_ps come and go only with `1` or `2`",
        ),
        (
            "sync_ps --elastic 2:4 --set sync_ps_config.straggler=drop",
            "error[P074]: `sync_ps_config.straggler` is `drop`; workers of sync_ps come and go only with `wait`",
        ),
        ("data_parallel -n 2 --elastic 3:4", "error[P074]: `--elastic 3:4`: the run starts with 2 workers"),
        ("data_parallel --elastic 3:4", "error[P074]: `--elastic 3:4`: the run starts with 2 of at least 3 workers"),
        ("data_parallel --elastic 3:2", "error[P009]: `--elastic 3:2`: MIN is at most MAX"),
        ("data_parallel --elastic 0:2", "error[P009]: `--elastic 0:2`: MIN is at least 1"),
        ("data_parallel --elastic ١:٢", "error[P009]: `--elastic ١:٢` is not MIN:MAX"),
        ("data_parallel --elastic 2", "error[P009]: `--elastic 2` is not MIN:MAX"),
        ("data_parallel --elastic 1:2 --engine openmpi", "error[P057]: the recipe exchanges its messages by gRPC"),
        (
            "data_parallel --naive --elastic 1:2",
            "error[P009]: `--elastic` was given with `--naive`, and the ranks of a naive form stay the same",
        ),
        ("--elastic 1:2 -- ls", "error[P009]: `--elastic` configures recipes; ls is a program"),
    ],
)
def test_what_does_not_allow_it_is_refused_by_name(ttlaunch, arguments, expected):
    answer = ttlaunch(f"plan {arguments}")
    assert (2, expected) == (answer.status, answer.stderr[: len(expected)])


def test_too_few_ranks_are_one_mistake_whose_hint_is_enough(ttlaunch):
    answer = ttlaunch("plan elastic_dp -n 1 --elastic 2:3")
    assert (2, 1) == (answer.status, answer.stderr.count("error["))
    assert "hint: `--ranks 2`, or a smaller MIN" in answer.stderr
    assert 0 == ttlaunch("plan elastic_dp -n 2 --elastic 2:3").status


def test_the_example_of_the_page_ends_as_it_says(ttlaunch):
    line = "plan fully_sharded --elastic 1:2"
    assert f"ttlaunch {line}\n" in ttlaunch("explain P074").stdout
    answer = ttlaunch(line)
    assert (2, True) == (answer.status, answer.stderr.startswith("error[P074]: "))


def test_every_recipe_says_how_workers_come_and_go_or_why_they_have_to_stay():
    for found in list_recipes(Path.cwd()):
        recipe = load_recipe(find_recipe(found.name, working_folder=Path.cwd()))
        assert isinstance(recipe.elastic, Elastic) or recipe.elastic, found.name


@pytest.mark.parametrize(
    ("stage", "optimizer", "expected"), [(1, "adamw", 8), (2, "adamw", 12), (3, "adamw", 16), (3, "sgd", 12)]
)
def test_the_plan_says_how_much_memory_shadows_need(ttlaunch, stage, optimizer, expected):
    keys = f"--set zero_config.stage={stage} --set training_config.optimizer={optimizer}"
    lines = ttlaunch(f"plan zero -n 4 --elastic 1:4 {keys}").stdout.splitlines()
    [line] = [one for one in lines if "shadow" in one]
    assert line.startswith(f"elastic  each worker keeps as a shadow {expected} / W bytes of each parameter")
    assert f"{expected / 4:.1f} with 4 workers" in line


@pytest.mark.parametrize(
    "recipe",
    [
        "data_parallel",
        "zero --set zero_config.stage=0",
        "classic_dp --set classic_dp_config.staleness_bound=0",
    ],
)
def test_the_plan_says_how_much_memory_the_mean_of_the_last_step_needs(ttlaunch, recipe):
    line = "elastic  each worker keeps 4 bytes of each parameter of the last step, for one that lacks it"
    assert line in ttlaunch(f"plan {recipe} -n 4 --elastic 1:4").stdout


@pytest.mark.parametrize(
    "recipe",
    ["zero", "classic_dp --set classic_dp_config.staleness_bound=1", "local_sgd", "elastic_dp --elastic 2:4"],
)
def test_the_plan_names_no_mean_where_no_worker_keeps_one(ttlaunch, recipe):
    elastic = "" if "--elastic" in recipe else "--elastic 1:4"
    shown = ttlaunch(f"plan {recipe} -n 4 {elastic}").stdout
    assert "elastic  " in shown
    assert "of the last step, for one that lacks it" not in shown


def test_the_plan_names_no_shadows_where_every_worker_has_everything(ttlaunch):
    assert "shadow" not in ttlaunch("plan zero -n 4 --elastic 1:4 --set zero_config.stage=0").stdout
