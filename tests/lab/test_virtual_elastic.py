"""`simulate --virtual --elastic`: an epoch of n workers is a simulation of n workers; and what is refused."""

from dataclasses import replace
from functools import cache

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.virtual_elastic_view import render_elastic
from ttlaunch.diagnostics import LaunchError, Source
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, run_virtually
from ttlaunch.lab.virtual_costs import WorkerCosts
from ttlaunch.lab.virtual_elastic import run_elastic_virtually
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


def simulate(text="", *, spec=ELASTIC, conditions=CONDITIONS, steps=30, start_s=0.3):
    ordered = replace(conditions, faults=faults(text)) if text else conditions
    return run_elastic_virtually(spec, ordered, Unattended(), steps=steps, start_s=start_s)


@cache
def plain(workers):
    spec = RunSpec("data_parallel", overrides=(*TINY, f"multihost_config.num_workers={workers}"))
    return run_virtually(plan_simulation(spec, Unattended(), has_room=True), CONDITIONS)


@pytest.fixture(scope="module")
def changing():
    return simulate("join at step=3; kill rank=1 at step=14")


def test_without_a_change_an_elastic_run_is_the_run_of_as_many_ranks():
    found, alone = simulate(steps=3), plain(2)
    [epoch] = found.epochs
    assert alone.as_json() == {**epoch.run.as_json(), "conditions": alone.conditions.as_json()}
    assert 3 * alone.step_ms == pytest.approx(found.over_s * 1e3, rel=1e-12)
    assert ("done", 0) == (found.verdict.status, found.verdict.exit_status)


def test_an_epoch_has_the_step_and_the_bytes_of_a_run_of_as_many_ranks(changing):
    assert [2, 3, 2, 3] == [len(one.epoch.members) for one in changing.epochs]
    for one in changing.epochs:
        alone = plain(len(one.epoch.members))
        assert (alone.step_ms, alone.step_bytes, alone.formula_step_bytes) == (
            one.step_ms,
            one.run.step_bytes,
            one.run.formula_step_bytes,
        )
        # The formula says it of all-reduces in one order, and the simulation has counted the same.
        assert (0, None) == (one.run.differing, one.run.no_formula)
        assert one.run.formula_step_bytes > 0


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
        assert (1, state + means * 4 * facts["values"]) == (states, changing.bytes_taken(changing.workers[number]))


def test_the_epochs_are_shown_with_what_a_change_costs(changing):
    text = "\n".join(render_elastic(changing))
    assert "2 workers start on a virtual clock, 1 to 3 make each of 30 steps" in text
    assert "worker-0002 joined" in text
    assert "worker-0001 was killed by SIGKILL" in text
    assert "bytes            of each step, exactly as the formula says" in text
    assert "the run          done, over after" in text
    assert changing.as_json()["epochs"][2]["members"] == [0, 2]


def test_a_slow_worker_stays_slow_wherever_its_place_is():
    found = simulate("kill rank=0 at step=2", conditions=replace(CONDITIONS, slow={1: 3.0}), steps=4, start_s=9.0)
    first, alone = found.epochs
    assert 3 * 4 * 100.0 == pytest.approx(first.step_ms, rel=0.01)
    assert 3 * 8 * 100.0 == pytest.approx(alone.step_ms, rel=0.01)


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
        (
            {"target": "zero", "overrides": ()},
            (
                "`--elastic` cannot be simulated for zero: "
                "its members send other messages than ranks that stay, which alone can be simulated"
            ),
        ),
        (
            {"target": "local_sgd", "overrides": ()},
            (
                "`--elastic` cannot be simulated for local_sgd: "
                "a change of its members also loses local steps, of which the virtual clock knows nothing"
            ),
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused_as_for_a_run(options, message):
    with pytest.raises(LaunchError) as refused:
        simulate(spec=replace(ELASTIC, **options))
    assert message == refused.value.diagnostics[0].message


@pytest.mark.parametrize("text", ["interrupt at step=3", "flip-gradient rank=0 at step=3", "continue rank=1 at 1s"])
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
    costs.mean_bytes = 125_000_000
    assert (["a", "a", "b", "b"], "a") == (hosts[:4], hosts[4])
    # Worker 4 of host a: a half from host a itself, the other one from worker 3 over both ports.
    assert 0.5 + 100e-6 == pytest.approx(costs.mean_s(4, (0, 3)))
    assert 1.5 + 100e-6 == pytest.approx(costs.mean_s(4, (2, 3)))  # one of both halves is twice as slow
    assert 125e6 / 8e9 + 50e-6 == pytest.approx(costs.mean_s(4, (0, 1)))
