"""What is asked for after a host was lost: spare hosts first, else fewer ranks, else a reason why there is no next attempt."""

import time
from dataclasses import replace

import pytest

from tests.spec.topology.clusters import WIDE, WIDE_BINDINGS
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.replan import Replanned, repeatable, replan
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.errors import HostError, Trouble
from ttlaunch.running.restarts import Restart, wait_for_lease

pytestmark = pytest.mark.mpi  # a plan names an mpirun

HOSTS = "a slots=1\nb slots=1\nc slots=1\nd slots=1\n"
WORKERS = "multihost_config.num_workers"


@pytest.fixture
def lost(here):
    """`lost("a", …)`: what follows the loss of these hosts, after an attempt with what else is given."""

    def follow(*hosts, target="data_parallel", silent=(), bindings=None, **typed):
        folder = here / "configurations/lab"
        folder.mkdir(parents=True)
        (folder / "hosts.txt").write_text("".join(HOSTS.splitlines(keepends=True)[: 3 if bindings else 4]))
        if bindings:
            (folder / "rank_bindings.yaml").write_text(bindings)
            (folder / "mgd.yaml").write_text(WIDE)
        request = RunSpec(target, on="lab", **typed)
        first = prepare(request, Unattended())
        asked = {host: HostError(host, Trouble.UNREACHABLE, "no route to host") for host in silent}
        following = replan(request, first, Restart(None, hosts), ask=lambda _: asked)
        if isinstance(following, Replanned):
            again = prepare(following.request, Unattended())
            assert not set(again.plan.hosts) & {*hosts, *silent}
            assert following.request == replace(
                request,
                excluded=following.request.excluded,
                ranks=following.request.ranks,
                overrides=following.request.overrides,
            )
            return following.change, [str(row.host) for row in again.plan.ranks]
        return following

    return follow


def test_a_spare_host_takes_the_place_of_the_lost_one(lost):
    change = ", without b, with the spare host d"
    assert (change, ["a", "c", "d"]) == lost("b", overrides=(f"{WORKERS}=3",))


def test_a_spare_host_that_does_not_answer_is_none(lost):
    change = f", without b, 2 ranks instead of 3 (`--set {WORKERS}=2`)"
    assert (change, ["a", "c"]) == lost("b", silent=["d"], overrides=(f"{WORKERS}=3",))


def test_a_host_that_nobody_missed_but_that_is_silent_now_is_left_out_too(lost):
    change = f", without b and c, with the spare host d, 2 ranks instead of 3 (`--set {WORKERS}=2`)"
    assert (change, ["a", "d"]) == lost("b", silent=["c"], overrides=(f"{WORKERS}=3",))


def test_without_a_lost_host_everything_is_asked_for_as_it_was(lost):
    assert ("", ["a", "b"]) == lost()


def test_ranks_that_were_asked_for_may_become_fewer(lost):
    change = ", without b, 3 ranks instead of 4"
    assert (change, ["a", "c", "d"]) == lost("b", target="hierarchical_parallel", ranks=4)


def test_bound_ranks_keep_their_meshes(lost):
    overrides = (f"{WORKERS}=3",)
    change = f", without c, 2 ranks instead of 3 (`--set {WORKERS}=2`)"
    assert (change, ["a", "b"]) == lost("c", bindings=WIDE_BINDINGS, overrides=overrides)


def test_a_program_needs_as_many_slots_as_it_had(lost):
    assert (", without a, with the spare host c", ["b", "c"]) == lost("a", target="true", is_command=True, ranks=2)


def test_a_program_is_given_up_where_slots_are_missing(lost):
    expected = Diagnostic("R054", "given up: true runs with 4 ranks, and 3 slots are left without a")
    assert expected == lost("a", target="true", is_command=True, ranks=4)


def test_a_recipe_is_given_up_where_no_host_is_left(lost):
    answer = lost("a", "b", silent=["c", "d"], overrides=(f"{WORKERS}=4",))
    notes = ("c does not answer: no route to host", "d does not answer: no route to host")
    hints = ("once a, b, c and d are back, `--resume latest` goes on",)
    expected = Diagnostic("R054", "given up: no host is left without a, b, c and d", notes=notes, hints=hints)
    assert expected == answer


def test_a_mesh_of_several_hosts_is_not_driven_in_part(lost):
    message = "given up: the bindings allow no run without a: mesh 0 spans several hosts and cannot be driven without one of them"
    hints = ("once a is back, `--resume latest` goes on",)
    assert Diagnostic("R055", message, hints=hints) == lost("a", bindings=WIDE_BINDINGS, overrides=(f"{WORKERS}=3",))


def test_what_came_on_standard_input_is_read_from_the_first_attempt(here):
    typed = RunSpec("data_parallel", config_file="-", overrides=("training_config.seed=1",))
    again = replace(typed, config_file=str(here / "train.yaml"), overrides=())
    assert again == repeatable(typed, here)
    assert again == repeatable(again, here / "elsewhere")


def test_nobody_waits_where_no_lease_runs():
    said = []
    wait_for_lease(Restart(None), report=said.append)
    assert [] == said


def test_it_is_said_what_is_waited_for():
    said = []
    wait_for_lease(Restart(None, ("b", "c"), time.time() + 9e9, 0.01), report=said.append)
    assert ["waiting 0 s until b and c have ended their ranks for certain; Ctrl-C cancels the restart"] == said
