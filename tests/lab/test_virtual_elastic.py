"""`simulate --virtual --elastic`: an epoch of n workers is a simulation of n workers; and what is refused."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest

from tests.changed_recipes import copied_recipe
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.virtual_elastic_view import render_elastic
from ttlaunch.diagnostics import LaunchError, Source
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, run_each_virtually
from ttlaunch.lab.virtual_costs import WorkerCosts
from ttlaunch.lab.virtual_elastic import run_elastic_virtually
from ttlaunch.lab.virtual_gifts import equal_parts
from ttlaunch.planning.fault_parser import parse_faults

TINY = (
    "training_config.validation_sequences=2",
    "transformer_config.embedding_dim=8",
    "transformer_config.num_heads=1",
    "transformer_config.max_sequence_length=8",
)
ELASTIC = RunSpec("data_parallel", ranks=2, elastic="1:3", overrides=TINY)
CONDITIONS = Conditions(compute_ms=100.0)


def faults(text):
    found, mistakes = parse_faults(Source("--plan", text))
    assert [] == mistakes
    return tuple(found)


def simulate(text="", *, spec=ELASTIC, conditions=CONDITIONS, steps=30, start_s=0.3, simulate_each=run_each_virtually):
    ordered = replace(conditions, faults=faults(text)) if text else conditions
    return run_elastic_virtually(spec, ordered, Unattended(), steps=steps, start_s=start_s, simulate=simulate_each)


# Of each recipe a change, with a run for it that is long enough, and runs of ranks that stay, like its last epochs: how many
# workers, and which is slow. All of them together are what takes time here.
CHANGES = {
    "data_parallel": ("join at step=3; kill rank=1 at step=14", {}),
    "hierarchical_parallel": ("kill rank=0 at step=3", {"ranks": 4, "elastic": "3:4", "slow": {3: 3.0}}),
    "sync_ps": ("kill rank=1 at step=3", {"ranks": 4, "elastic": "3:4", "set": ("sync_ps_config.num_servers=2",)}),
    "zero": ("kill rank=1 at step=3", {"ranks": 3, "elastic": "1:3"}),
    "local_sgd": ("kill rank=1 at step=3", {"ranks": 3, "elastic": "1:3", "set": ("local_sgd_config.every=2",)}),
    "elastic_dp": ("kill rank=1 at step=3", {"ranks": 3, "elastic": "2:3", "slow": {2: 3.0}}),
    "classic_dp": (
        "kill rank=1 at step=3",
        {"ranks": 3, "elastic": "1:3", "set": ("classic_dp_config.staleness_bound=2",)},
    ),
}
PLAIN = {
    "data_parallel": [(2, {}), (3, {})],
    "hierarchical_parallel": [(2, {1: 3.0}), (1, {0: 3.0})],
    "sync_ps": [(1, {})],
    "zero": [(2, {})],
    "local_sgd": [(2, {})],
    "elastic_dp": [(2, {1: 3.0}), (1, {0: 3.0})],
    "classic_dp": [(2, {})],
}
_ORDER = [(recipe, workers) for recipe, runs in PLAIN.items() for workers, _ in runs]


class InOneProcess:
    """Simulates in one process, which imports torch once, what several runs whose members change ask for first."""

    def __init__(self):
        self._orders, self._found = [], {}

    def note(self, orders):
        self._orders += orders
        raise NotedError

    def run(self, orders):
        """Simulate what was noted, and these orders; returns the results of the latter."""
        noted = self._orders
        found = run_each_virtually([*noted, *orders])
        self._found = {self._key(*one): result for one, result in zip(noted, found, strict=False)}
        return found[len(noted) :]

    def __call__(self, orders):
        return [self._found[self._key(*one)] for one in orders]

    def _key(self, plan, conditions):
        return plan.hash, json.dumps(conditions.as_json(), sort_keys=True)


class NotedError(Exception):
    """What is to be simulated was noted."""


def change(recipe, simulate_each):
    text, given = CHANGES[recipe]
    settings = (*TINY, *given.get("set", ()))
    spec = RunSpec(recipe, ranks=given.get("ranks", 2), elastic=given.get("elastic", "1:3"), overrides=settings)
    is_long = recipe == "data_parallel"
    conditions = replace(CONDITIONS, slow=given.get("slow", {}))
    steps, start_s = (30, 0.3) if is_long else (6, 60.0)
    return simulate(text, spec=spec, conditions=conditions, steps=steps, start_s=start_s, simulate_each=simulate_each)


@pytest.fixture(scope="module")
def simulated():
    """Runs whose ranks stay, by recipe and number of workers; and what has simulated them, and what changes of members need."""
    orders = []
    for recipe, runs in PLAIN.items():
        settings = CHANGES[recipe][1].get("set", ())
        for workers, slow in runs:
            spec = RunSpec(recipe, overrides=(*TINY, *settings, f"multihost_config.num_workers={workers}"))
            plan = plan_simulation(spec, Unattended(), has_room=True)
            # Of `local_sgd` one alone, and one after which workers agree; of `elastic_dp` three tasks for each worker; of
            # `classic_dp` four more: two by which one may lead the other, the first one and the last.
            steps = {"local_sgd": 2, "elastic_dp": 3 * workers, "classic_dp": 7}.get(recipe, 3)
            orders.append((plan, replace(CONDITIONS, slow=slow, steps=steps)))
    together = InOneProcess()
    for recipe in CHANGES:
        with pytest.raises(NotedError):
            change(recipe, together.note)
    return dict(zip(_ORDER, together.run(orders), strict=True)), together


@pytest.fixture(scope="module")
def plain(simulated):
    return simulated[0]


@pytest.fixture(scope="module")
def changed(simulated):
    """A run of each recipe whose members change, made when it is asked for."""
    return cache(lambda recipe: change(recipe, simulated[1]))


def later_ms(run):
    """The mean step without the first one, of the ranks whose steps take longest."""
    return max(sum(one.each_ms[1:]) / len(one.each_ms[1:]) for one in run.groups)


@pytest.fixture
def changing(changed):
    return changed("data_parallel")


def test_an_epoch_of_members_that_have_all_is_the_run_of_as_many_ranks(changing, plain):
    assert [2, 3, 2, 3] == [len(one.epoch.members) for one in changing.epochs]
    for one in changing.epochs:
        alone = plain["data_parallel", len(one.epoch.members)]
        assert alone.as_json() == {**one.run.as_json(), "conditions": alone.conditions.as_json()}
        assert (later_ms(alone), alone.formula_step_bytes) == (one.step_ms, one.step_bytes)
        # The formula says it of all-reduces in one order, and the simulation has counted the same.
        assert (0, None) == (one.differing, one.no_formula)
        assert one.step_bytes > 0
    assert ("done", 0) == (changing.verdict.status, changing.verdict.exit_status)


@pytest.mark.parametrize(
    ("recipe", "members"),
    [
        # Worker 2 takes the place of the optimizer, and worker 3, which is slow, is the only one that differentiates.
        ("hierarchical_parallel", [(0, 1, 2, 3), (2, 1, 3)]),
        ("sync_ps", [(0, 1, 2, 3), (0, 2, 3)]),
        ("zero", [(0, 1, 2), (0, 2)]),
        ("local_sgd", [(0, 1, 2), (0, 2)]),
    ],
)
def test_an_epoch_of_members_with_places_has_the_step_of_ranks_that_stay_with_these_roles(
    changed, plain, recipe, members
):
    found = changed(recipe)
    assert members == [one.epoch.members for one in found.epochs]
    runs = [plain[key] for key in _ORDER if key[0] == recipe]
    # A last step after which workers agree, and validate, is 50 µs shorter than one that others follow.
    times = [pytest.approx(one.step_ms, rel=1e-3) if recipe == "local_sgd" else later_ms(one) for one in runs]
    assert times == [one.step_ms for one in found.epochs][-len(runs) :]
    assert ("done", ["replaced"]) == (found.verdict.status, [str(one.outcome) for one in found.verdict.faults])


def test_a_slow_worker_stays_slow_wherever_its_place_is(changed):
    """It has 4 of 8 micro-batches of 100 ms first, and then all."""
    first, then = changed("hierarchical_parallel").epochs
    assert [3 * 4 * 100.0, 3 * 8 * 100.0] == pytest.approx([one.step_ms for one in (first, then)], rel=0.001)


@pytest.mark.parametrize("recipe", ["hierarchical_parallel", "sync_ps"])
def test_the_step_of_an_epoch_has_no_part_of_the_validation_before_the_first_one(changed, recipe):
    """A simulation of ranks that stay has: whoever updates waits for the losses of all workers in its first step."""
    first = changed(recipe).epochs[0]
    waited_ms = [one.each_ms[0] - one.each_ms[1] for one in first.run.groups]
    assert max(waited_ms) > 30.0
    assert first.run.step_ms > first.step_ms + 10.0


def test_bytes_of_members_are_those_that_a_report_compares_with_what_they_sent(changed):
    """Workers send a gradient for each sum of a block of theirs, keepers send the mean to each other, and workers get the weights."""
    first, then = changed("hierarchical_parallel").epochs
    size = 4 * first.run.facts["values"]
    assert [5 * size, 3 * size] == [one.step_bytes - one.step_bytes % size for one in (first, then)]
    assert first.step_bytes % size < 300  # what says which sum it is
    assert [None, None] == [one.step_bytes for one in changed("zero").epochs]
    assert "it has none for members that come and go" == changed("zero").epochs[0].no_formula


@pytest.mark.parametrize(("recipe", "number"), [("hierarchical_parallel", 2), ("sync_ps", 2)])
def test_who_takes_the_place_of_one_that_kept_the_state_gets_all_of_it(changed, recipe, number):
    found = changed(recipe)
    facts = found.epochs[0].run.facts
    state = 3 * 4 * facts["values"] + 4 * facts["tensors"]
    others = [one for one in found.workers if one != number]
    assert ([1, 0], state) == (found.workers[number].taken, found.workers[number].got)
    assert {0} == {found.workers[one].got for one in others}


def test_shards_that_are_cut_anew_move_what_members_have_not_had(changed):
    """When one of three workers of `zero` is killed, each of the two that are left gets what it has not had of the two new slots.

    Worker 0 had kept the first and the third of three slots, and worker 2 the third and the second.
    """
    found = changed("zero")
    facts = found.epochs[0].run.facts
    third = (3 * 4 * facts["values"] + 4 * facts["tensors"]) / 3
    assert {0: third, 2: third} == {number: pytest.approx(found.workers[number].got, rel=0.01) for number in (0, 2)}
    assert 8 == found.epochs[1].epoch.computed_anew  # no sums of a whole step are kept


def test_a_step_that_a_killed_worker_has_made_alone_is_lost(changed):
    """Workers agree after every second step, and it has made one since."""
    found = changed("local_sgd")
    assert [0, 1] == [one.epoch.lost_steps for one in found.epochs]
    assert [0, 0] == [one.step_bytes for one in found.epochs]  # nothing is sent in each step
    assert 0 == sum(one.differing for one in found.epochs)


def test_workers_that_wait_for_nobody_share_the_time_of_a_step(changed, plain):
    """Worker 2 takes three times as long for a task of 8 micro-batches of 100 ms as worker 1, which is killed."""
    found = changed("elastic_dp")
    assert [(0, 1, 2), (0, 2)] == [one.epoch.members for one in found.epochs]
    both, alone = (
        [
            sum(one.each_ms[1:]) / len(one.each_ms[1:])
            for one in plain["elastic_dp", count].groups
            if "worker" == one.role
        ]
        for count in (2, 1)
    )
    assert [800.0, 2400.0, 2400.0] == pytest.approx([*both, *alone], rel=1e-6)
    assert [1 / sum(1 / task for task in both), alone[0]] == pytest.approx([one.step_ms for one in found.epochs])
    assert 6 == sum(one.epoch.steps for one in found.epochs)
    assert [None, None] == [one.step_bytes for one in found.epochs]


def test_tasks_that_are_handed_out_again_are_shown(changed):
    found = changed("elastic_dp")
    text = "\n".join(render_elastic(found))
    assert (
        "3 workers start on a virtual clock, 2 to 3 take part, and the first one hands each of 6 steps to one" in text
    )
    assert "worker-0001 was killed by SIGKILL; 1 task handed out again" in text
    assert [0, 1] == [one["tasks_again"] for one in found.as_json()["epochs"]]


def test_steps_that_overlap_take_as_long_as_those_of_ranks_that_stay(changed, plain):
    """Without the first three, in which nobody waits, and the last one, in which all wait for each other."""
    found = changed("classic_dp")
    assert [(0, 1, 2), (0, 2)] == [one.epoch.members for one in found.epochs]
    [alone] = [plain["classic_dp", 2]]
    each = max((one.each_ms[3:-1] for one in alone.groups), key=sum)
    assert sum(each) / len(each) == found.epochs[1].step_ms == pytest.approx(400.0, rel=1e-3)
    assert ("done", ["replaced"]) == (found.verdict.status, [str(one.outcome) for one in found.verdict.faults])


@pytest.mark.parametrize("bound", [2, 20])
def test_a_step_takes_as_long_as_its_messages_where_those_take_longer_than_computing(bound):
    """However many steps pass before somebody waits for the first of them."""
    overrides = (*TINY, f"classic_dp_config.staleness_bound={bound}")
    spec = RunSpec("classic_dp", ranks=2, elastic="1:2", overrides=overrides)
    conditions = replace(CONDITIONS, link_gbps=1e-4)
    found = simulate("", spec=spec, conditions=conditions, steps=40, start_s=60.0)
    [only] = found.epochs
    ring_ms = (
        4 * only.run.facts["values"] / (conditions.link_gbps * 1e9 / 8) * 1e3
    )  # to each worker all of the mean once
    assert 2 * only.run.micro_batch_s * 1e3 < ring_ms < only.step_ms < 1.1 * ring_ms


@pytest.mark.parametrize(
    ("recipe", "left_out", "why", "hint"),
    [
        (
            "elastic_dp",
            "        tasks_in_hand=tasks_in_hand,\n",
            "it does not say how many tasks of its server a worker has at a time",
            "`tasks_in_hand` of its `Elastic` says so",
        ),
        (
            "classic_dp",
            "clock_gap=clock_gap, ",
            "its members keep no mean gradient for one that lacks a step, as where messages of several steps overlap",
            "`clock_gap` of its `Elastic` says by how many steps they may lead each other; `ttlaunch chaos` takes all",
        ),
    ],
)
def test_a_recipe_that_does_not_say_what_its_members_do_is_refused(here, recipe, left_out, why, hint):
    declared = copied_recipe(here / "mine", recipe).with_name("recipe.py")
    assert 1 == declared.read_text().count(left_out)
    declared.write_text(declared.read_text().replace(left_out, ""))
    with pytest.raises(LaunchError) as refused:
        simulate(spec=RunSpec("mine/", ranks=3, elastic="2:3"))
    [found] = refused.value.diagnostics
    assert (f"`--elastic` cannot be simulated for mine: {why}", (hint,)) == (found.message, found.hints)


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("clock_gap", "-1", "`clock_gap` is -1"),
        ("clock_gap", "'2'", "`clock_gap` is '2'"),
        ("clock_gap", "lambda _: 10**9", "`clock_gap` is 1000000000"),
        (
            "tasks_in_hand",
            "2",
            "it says how many tasks of its server a worker has at a time, and no server hands out tasks",
        ),
        (
            "clock_gap",
            "2",
            "it says that its members lead each other, and they wait in each step, for a server or to keep its mean",
        ),
    ],
)
def test_a_recipe_that_says_what_no_run_does_is_refused(here, name, given, why):
    declared = copied_recipe(here / "mine", "data_parallel").with_name("recipe.py")
    form = re.search(r"elastic=(Elastic\(.*?\n    \)),", declared.read_text(), re.DOTALL)[1]
    changed = declared.read_text().replace(form, f"dataclasses.replace({form}, {name}={given})")
    declared.write_text(changed.replace("from ", "import dataclasses\nfrom ", 1))
    with pytest.raises(LaunchError) as refused:
        simulate(spec=RunSpec("mine/", ranks=2, elastic="1:3"))
    assert f"`--elastic` cannot be simulated for mine: {why}" == refused.value.diagnostics[0].message


def test_the_times_of_steps_and_changes_add_up(changing):
    """In each epoch but for its first step, every step takes as long as in a run of as many ranks."""
    ends = [*(one.epoch.done_s for one in changing.epochs[1:]), None]
    for one, next_done_s in zip(changing.epochs, ends, strict=True):
        last_s = one.epoch.done_s + (one.epoch.steps - 1) * one.step_ms / 1e3
        if next_done_s is None:
            assert last_s == pytest.approx(changing.over_s)
        else:
            after = changing.epochs[changing.epochs.index(one) + 1]
            assert next_done_s - last_s == pytest.approx(after.step_ms / 1e3 + after.epoch.lost_s)


def test_one_that_comes_gets_the_state_over_the_link(changing):
    """Weights and AdamW's two moments, and the counter of each tensor."""
    facts = changing.epochs[0].run.facts
    state = 3 * 4 * facts["values"] + 4 * facts["tensors"]
    for number in (2, 3):
        states, means = changing.workers[number].taken
        assert (1, state + means * 4 * facts["values"]) == (states, changing.workers[number].got)


def test_the_epochs_are_shown_with_what_a_change_costs(changing):
    text = "\n".join(render_elastic(changing))
    assert "2 workers start on a virtual clock, 1 to 3 make each of 30 steps" in text
    assert "worker-0002 joined" in text
    assert "worker-0001 was killed by SIGKILL" in text
    assert "bytes            of each step, exactly as the formula says" in text
    assert "the run          done, over after" in text
    assert changing.as_json()["epochs"][2]["members"] == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elastic": "0:3"}, "`--elastic 0:3`: MIN is at least 1"),
        ({"elastic": "1:99"}, "`--elastic 1:99`: a step has 8 micro-batches, so at most as many workers make it"),
        ({"elastic": "2:3", "ranks": 1}, "`--elastic 2:3`: the run starts with 1 worker, fewer than MIN"),
        (
            {"target": "pipeline_parallel", "overrides": (), "ranks": None},
            (
                "`--elastic` lets workers come and go, and those of pipeline_parallel have to stay: "
                "each stage holds blocks that nobody else has"
            ),
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused_as_for_a_run(options, message):
    with pytest.raises(LaunchError) as refused:
        simulate(spec=replace(ELASTIC, **options))
    assert message == refused.value.diagnostics[0].message


@pytest.mark.parametrize("text", ["interrupt at step=3", "flip-gradient rank=0 at step=3", "term rank=1 at 1s"])
def test_faults_of_a_run_that_are_not_simulated_are_refused(text):
    with pytest.raises(LaunchError) as refused:
        simulate(text)
    assert [("P037", f"`{text}` cannot be simulated")] == [(one.code, one.message) for one in refused.value.diagnostics]


def test_a_moment_after_the_last_step_never_comes():
    with pytest.raises(LaunchError, match="`step=31` never comes"):
        simulate("join at step=31")


def test_a_state_crosses_the_ports_of_hosts_and_a_slow_port_slows_it(tmp_path):
    """Two hosts with two workers each; 1 Gbit/s is 125 MB/s."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("a slots=2\nb slots=2\n")
    spec = replace(ELASTIC, ranks=4, elastic="1:8", hostfile=hostfile)
    plan = plan_simulation(spec, Unattended(), has_room=True)
    hosts = [row.host for row in plan.ranks]
    costs = WorkerCosts(spec, plan, Conditions(link_gbps=1.0, link_us=100.0, slow_link={2: 2.0}), steps=3)

    def moved(number, members):
        return costs.transfers_s({number: equal_parts(125_000_000, members)})[number]

    assert (["a", "a", "b", "b"], "a") == (hosts[:4], hosts[4])
    # Worker 4 of host a: a half from host a itself, the other one from worker 3 over both ports.
    assert 0.5 + 100e-6 == pytest.approx(moved(4, (0, 3)))
    assert 1.5 + 100e-6 == pytest.approx(moved(4, (2, 3)))  # one of both halves is twice as slow
    assert 125e6 / 8e9 + 50e-6 == pytest.approx(moved(4, (0, 1)))


def test_transfers_that_begin_together_share_the_ports():
    """On one machine each worker has a port of its own; 1 Gbit/s is 125 MB/s."""
    plan = plan_simulation(ELASTIC, Unattended(), has_room=True)
    costs = WorkerCosts(ELASTIC, plan, Conditions(link_gbps=1.0, link_us=100.0, slow_link={1: 2.0}), steps=3)
    both = costs.transfers_s({2: {0: 125e6}, 3: {0: 125e6, 1: 62.5e6}})
    assert {2: 2.0 + 100e-6, 3: 2.0 + 100e-6} == pytest.approx(both)  # both wait for the port of worker 0
    assert 1.0 + 100e-6 == pytest.approx(costs.transfers_s({3: {1: 62.5e6}})[3])  # which is half as fast
