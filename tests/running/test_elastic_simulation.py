"""A simulated elastic run has the members and the steps of a real one with the same faults."""

import json
import subprocess
import sys
from itertools import pairwise
from statistics import median

import pytest

from tests.changed_recipes import changed_recipe, copied_recipe, write_before
from ttlaunch import contract
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Source
from ttlaunch.lab.virtual import Conditions
from ttlaunch.lab.virtual_elastic import run_elastic_virtually
from ttlaunch.lab.virtual_faults import Patience
from ttlaunch.planning.fault_parser import parse_faults
from ttlaunch.running.membership.journal import read_journal
from ttlaunch.running.runs.run_folder import read_events

STEPS, LEAF_S, MOST_S = 24, 0.1, 240.0
SLOW = f"__import__('time').sleep({LEAF_S})"


def slow_members(here, recipe):
    """Write a copy of a recipe whose micro-batches sleep for most of their time, so that other work on the machine changes little."""
    if recipe == "data_parallel":
        changed_recipe(here, "index, x_BT, y_BT = batch", SLOW, indent=8)
        return
    trainer = copied_recipe(here / "mine", recipe)
    if recipe == "classic_dp":
        write_before(trainer, "        expect = partial(means.expect, index)", f"        {SLOW}\n")
        return
    if recipe in {"local_sgd", "diloco"}:
        write_before(trainer, "        known = replica.step(step)", f"        {slow_row('ctx.ranks(ctx.role)')}\n")
        return
    member = trainer.with_name("elastic.py")
    if recipe == "elastic_dp":
        write_before(member, "                loss, tokens = differentiate(model, x_BT, ", f"                {SLOW}\n")
        return
    if recipe == "zero":
        write_before(
            member, "        passes = LayerPasses(", f"        indices = [({SLOW}, index)[1] for index in indices]\n"
        )
        return
    servers, before, after = {
        "hierarchical_parallel": (2, "validate=validate)", "validate=validate, around={})"),
        "sync_ps": (1, "around=lambda: slowed(slow_workers, ctx.rank - servers)", "around={}"),
    }[recipe]
    slow = slow_row(f"ctx.ranks('member')[{servers}:]")
    pause = f"lambda: ({slow}, __import__('contextlib').nullcontext())[1]"
    assert 1 == member.read_text().count(before)
    member.write_text(member.read_text().replace(before, after.format(pause)))


def slow_row(workers):
    """The call that sleeps for all micro-batches of a worker: its recipe differentiates them at once, and they are 8 for all workers."""
    return f"__import__('time').sleep(-(-8 // len({workers})) * {LEAF_S})"


def run_for_real(
    here, faults, *, recipe="data_parallel", ranks=2, elastic="1:3", steps=STEPS, is_warm=True, overrides=()
):
    """Make a run with faults; returns its folder, its report, and the outcomes of the faults."""
    slow_members(here, recipe)
    command = [sys.executable, "-m", "ttlaunch", "chaos", "mine/", "-n", str(ranks), "--elastic", elastic]
    command += ["--set", f"training_config.steps={steps}", "--plan", faults, "--format", "json"]
    command += [word for one in overrides for word in ("--set", one)]
    command += ["--warm"] if is_warm else []
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=False)
    assert 0 == done.returncode, done.stderr
    [folder] = [path for path in here.glob("runs/[!.]*") if path.is_dir()]
    report = json.loads((folder / "report.json").read_text())
    return folder, report, [one["outcome"] for one in json.loads(done.stdout)["faults"]]


def compare(report, outcomes, found, *, steps_apart, known=()):
    """Compare members, the steps after which each epoch began, the outcomes, the status and how many steps were made."""
    assert [epoch["members"] for epoch in report["epochs"]] == [list(one.epoch.members) for one in found.epochs], known
    real, simulated = ([epoch["step"] for epoch in report["epochs"]], [one.epoch.step for one in found.epochs])
    assert real == pytest.approx(simulated, abs=steps_apart), known
    lost = ([epoch["lost_steps"] for epoch in report["epochs"]], [one.epoch.lost_steps for one in found.epochs])
    assert lost[0] == pytest.approx(lost[1], abs=steps_apart), known
    assert outcomes == [str(one.outcome) for one in found.verdict.faults]
    assert (report["status"], found.steps) == (found.verdict.status, sum(one.epoch.steps for one in found.epochs))


def simulate(text, *, leaf_s, start_s, steps=STEPS, lease_s=15.0, **spec):
    faults, _ = parse_faults(Source("--plan", text))
    conditions = Conditions(compute_ms=leaf_s * 1e3, faults=tuple(faults), patience=Patience(lease_s))
    return run_elastic_virtually(RunSpec(**spec), conditions, Unattended(), steps=steps, start_s=start_s)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_simulation_has_the_members_and_steps_of_a_real_run_with_the_same_faults(here):
    """Times of this machine are given to the simulation: how long a worker starts, and how long a micro-batch takes.

    A worker still may be ready a step earlier or later.
    """
    text = "join at step=3; kill rank=1 at step=14"
    folder, report, outcomes = run_for_real(here, text)
    events = read_events(folder)
    join, _ = (event["time"] for event in events if event["event"] == "fault")
    replaced = next(event["time"] for event in events if event["event"] == "worker_started")
    start_s = (waited(folder, 2, since=join) + waited(folder, 3, since=replaced)) / 2
    leaf_s = micro_batch(folder, report, epoch=1, block=3)
    found = simulate(text, leaf_s=leaf_s, start_s=start_s, target="data_parallel", ranks=2, elastic="1:3")
    assert [[0, 1], [0, 1, 2], [0, 2], [0, 2, 3]] == [list(one.epoch.members) for one in found.epochs]
    compare(report, outcomes, found, steps_apart=1, known=(start_s, leaf_s))


@pytest.mark.mpi
@pytest.mark.slow
def test_a_stopped_worker_is_killed_and_replaced_in_a_simulation_as_in_a_real_run(here):
    """It has been stopped and continued before, which has delayed the others and nothing else."""
    text = "stop rank=1 at step=4; continue rank=1 at step=4; stop rank=1 at step=8"
    folder, report, outcomes = run_for_real(here, text)
    replaced = next(event["time"] for event in read_events(folder) if event["event"] == "worker_started")
    start_s, leaf_s = waited(folder, 3, since=replaced), micro_batch(folder, report, epoch=0, block=4)
    found = simulate(text, leaf_s=leaf_s, start_s=start_s, target="data_parallel", ranks=2, elastic="1:3")
    assert [[0, 1], [0], [0, 3]] == [list(one.epoch.members) for one in found.epochs]
    compare(report, outcomes, found, steps_apart=1, known=(start_s, leaf_s))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "victim", "members", "overrides"),
    [
        ("hierarchical_parallel", 0, [[0, 1, 2, 3], [2, 1, 3]], ()),
        ("sync_ps", 0, [[0, 1, 2], [2, 1]], ()),
        ("zero", 1, [[0, 1, 2], [0, 2]], ()),
        ("local_sgd", 1, [[0, 1], [0]], ()),
        ("diloco", 1, [[0, 1], [0]], ("diloco_config.every=4",)),
        ("classic_dp", 1, [[0, 1], [0]], ("classic_dp_config.staleness_bound=0",)),
        ("classic_dp", 1, [[0, 1], [0]], ("classic_dp_config.staleness_bound=2",)),
    ],
)
def test_members_of_each_recipe_change_in_a_simulation_as_in_a_real_run(here, recipe, victim, members, overrides):
    """The run is over before a worker has started in the place of the one that is killed, or else it is in both."""
    ranks, steps, text = len(members[0]), 14, f"kill rank={victim} at step=3"
    elastic = f"{ranks - 1}:{ranks}"
    folder, report, outcomes = run_for_real(
        here, text, recipe=recipe, ranks=ranks, elastic=elastic, steps=steps, is_warm=False, overrides=overrides
    )
    replaced = next(event["time"] for event in read_events(folder) if event["event"] == "worker_started")
    start_s = waited(folder, ranks + victim, since=replaced)
    block = max(stop - first for first, stop in report["epochs"][0]["blocks"])
    leaf_s = micro_batch(folder, report, epoch=0, block=block)
    spec = {"target": recipe, "ranks": ranks, "elastic": elastic, "overrides": overrides}
    found = simulate(text, leaf_s=leaf_s, start_s=start_s, steps=steps, **spec)
    assert members == [list(one.epoch.members) for one in found.epochs[:2]]
    # A step is measured before the fault. After it fewer workers share the cores, so those that are left are faster.
    compare(report, outcomes, found, steps_apart=3, known=(start_s, leaf_s))


def compare_tasks(report, found):
    """Compare how many tasks were handed out again, and let nothing be computed anew in either."""
    again = sum(one.epoch.tasks_again for one in found.epochs)
    assert report["results"]["tasks handed out again"] == again
    assert [0] * len(found.epochs) == [epoch["computed_anew"] for epoch in report["epochs"]]
    assert [0] * len(found.epochs) == [one.epoch.computed_anew for one in found.epochs]


@pytest.mark.mpi
@pytest.mark.slow
def test_tasks_of_a_killed_worker_are_handed_out_again_in_a_simulation_as_in_a_real_run(here):
    """Whichever tasks worker 1 has, its fourth one is the first that is number 7 or a later one."""
    text, form = "kill rank=1 at step=7", {"ranks": 3, "elastic": "2:3"}
    folder, report, outcomes = run_for_real(here, text, recipe="elastic_dp", **form)
    replaced = next(event["time"] for event in read_events(folder) if event["event"] == "worker_started")
    start_s, leaf_s = waited(folder, 4, since=replaced), micro_batch_of_tasks(folder, 1)
    found = simulate(text, leaf_s=leaf_s, start_s=start_s, target="elastic_dp", **form)
    assert [[0, 1, 2], [0, 2], [0, 2, 4]] == [list(one.epoch.members) for one in found.epochs]
    compare(report, outcomes, found, steps_apart=3, known=(start_s, leaf_s))
    compare_tasks(report, found)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_server_and_its_workers_go_on_in_a_simulation_as_in_a_real_run_when_others_come_and_stop(here):
    """A worker is stopped for a moment, one joins, and one is stopped for good."""
    text, form, steps = (
        "stop rank=1 at step=3; continue rank=1 at step=3; join at step=9; stop rank=2 at step=13",
        {"ranks": 3, "elastic": "2:4"},
        48,
    )
    folder, report, outcomes = run_for_real(here, text, recipe="elastic_dp", steps=steps, **form)
    join = [event["time"] for event in read_events(folder) if event["event"] == "fault"][2]
    replaced = next(event["time"] for event in read_events(folder) if event["event"] == "worker_started")
    start_s = (waited(folder, 3, since=join) + waited(folder, 5, since=replaced)) / 2
    leaf_s = micro_batch_of_tasks(folder, 1)
    found = simulate(text, leaf_s=leaf_s, start_s=start_s, steps=steps, target="elastic_dp", **form)
    assert [[0, 1, 2], [0, 1, 2, 3], [0, 1, 3], [0, 1, 3, 5]] == [list(one.epoch.members) for one in found.epochs]
    compare(report, outcomes, found, steps_apart=5, known=(start_s, leaf_s))
    compare_tasks(report, found)


@pytest.mark.mpi
@pytest.mark.slow
def test_members_that_may_lead_each_other_come_and_stop_in_a_simulation_as_in_a_real_run(here):
    """A worker is stopped for a moment, one joins, and one is stopped for good."""
    text = "stop rank=1 at step=3; continue rank=1 at step=3; join at step=5; stop rank=0 at step=12"
    form = {"ranks": 2, "elastic": "1:3", "overrides": ("classic_dp_config.staleness_bound=2",)}
    folder, report, outcomes = run_for_real(here, text, recipe="classic_dp", steps=36, **form)
    join = [event["time"] for event in read_events(folder) if event["event"] == "fault"][2]
    replaced = next(event["time"] for event in read_events(folder) if event["event"] == "worker_started")
    start_s = (waited(folder, 2, since=join) + waited(folder, 4, since=replaced)) / 2
    leaf_s = micro_batch(folder, report, epoch=1, block=3)
    found = simulate(text, leaf_s=leaf_s, start_s=start_s, steps=36, target="classic_dp", **form)
    assert [[0, 1], [0, 1, 2], [1, 2], [1, 2, 4]] == [list(one.epoch.members) for one in found.epochs]
    compare(report, outcomes, found, steps_apart=3, known=(start_s, leaf_s))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["kill", "stop"])
def test_a_lost_server_ends_a_run_in_a_simulation_as_a_real_one(here, verb):
    """The server is named, also one that was stopped, which the launcher itself has killed."""
    text, form = f"{verb} rank=0 at step=5", {"ranks": 3, "elastic": "2:3"}
    folder, report, outcomes = run_for_real(here, text, recipe="elastic_dp", **form)
    assert ["named"] == outcomes
    found = simulate(text, leaf_s=micro_batch_of_tasks(folder, 1), start_s=60.0, target="elastic_dp", **form)
    compare_ends(report, outcomes, found)


def compare_ends(report, outcomes, found):
    """Compare members, the outcomes, the status and the failure of runs that end early."""
    assert [epoch["members"] for epoch in report["epochs"]] == [list(one.epoch.members) for one in found.epochs]
    assert outcomes == [str(one.outcome) for one in found.verdict.faults]
    verdict = found.verdict
    assert (report["status"], report["exit_status"]) == (verdict.status, verdict.exit_status)
    failure = report["failure"]
    assert (failure["code"], failure["rank"]) == (verdict.failure.code, verdict.failure.rank)


def waited(folder, number, *, since):
    """How long a worker took from its start until it registered; a minute if it never did."""
    registered = {entry["worker"]: entry["time"] for entry in read_journal(folder) if entry["what"] == "registered"}
    return max(0.0, registered.get(number, since + 60.0) - since)


def micro_batch(folder, report, *, epoch, block):
    """How long one micro-batch took, in the steps from the second one of an epoch to the last fault."""
    events = read_events(folder)
    fault = [event for event in events if event["event"] == "fault"][-1]
    began = report["epochs"][epoch]
    first = began["time"] + (began["pause_s"] or 0.0 if epoch == 0 else 0.0)
    steps = fault["step"] - began["step"] - (epoch == 0)
    return (fault["time"] - first) / steps / block


def micro_batch_of_tasks(folder, number):
    """How long one of the 8 micro-batches of a task took, at the median of the tasks of a worker."""
    lines = (folder / contract.progress_file(number)).read_text().splitlines()
    done = [one["time"] for one in map(contract.read_record, lines) if one and one["kind"] == contract.KIND_STEP]
    return median(later - earlier for earlier, later in pairwise(done)) / 8
