"""What a scheduler's variables say about hosts, read as the scheduler writes them."""

import os
import shutil
import subprocess
import tracemalloc
from itertools import groupby

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.diagnostics import Source, has_errors, render
from ttlaunch.spec.topology.allocation import SYSTEMS, read_allocation
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.load import load_topology_files


def read(system, environment=None, *, file=None, slots=None):
    source = None if file is None else Source("FILE", file)
    return read_allocation(system, environment=environment or {}, file=source, slots=slots)


def hosts_of(system, environment=None, *, file=None, slots=None):
    """Names and slots of an allocation without mistakes."""
    allocation, found = read(system, environment, file=file, slots=slots)
    assert [] == found, render(found)
    return [(host.name, host.slots) for host in allocation.hosts]


def check(environment, expected, *, system="slurm", file=None, codes=("P054",)):
    """Compare the diagnostics about an allocation word for word."""
    allocation, found = read(system, environment, file=file)
    assert (None, list(codes)) == (allocation, [one.code for one in found])
    assert expected == render(found) + "\n"


# The grammar: names with numbered brackets, and runs of tasks. It is drawn, written as Slurm writes it, and read.


@st.composite
def brackets(draw):
    """A bracket as Slurm writes it, and the numbers that it stands for."""
    width = draw(st.integers(1, 3))
    parts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 12))
        last = first + draw(st.integers(0, 3))
        parts.append(f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}")
        numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return f"[{','.join(parts)}]", numbers


@st.composite
def node_names(draw):
    """One item of a list of nodes, such as `rack[1-2]-n[01-03,7]`, and its names in Slurm's order."""
    written = draw(st.sampled_from("abcdefgh"))
    names = [written]
    for _ in range(draw(st.integers(0, 2))):
        text, numbers = draw(brackets())
        middle = draw(st.sampled_from(["", "-n", "x"]))
        written += middle + text
        names = [f"{name}{middle}{number}" for name in names for number in numbers]
    return written, names


@st.composite
def allocations(draw):
    """The variables of a Slurm job, and its hosts with their slots."""
    items = draw(st.lists(node_names(), min_size=1, max_size=4))
    names = [name for _, names in items for name in names]
    counts = draw(st.lists(st.integers(1, 4), min_size=len(names), max_size=len(names)))
    runs = [(count, len(list(group))) for count, group in groupby(counts)]
    tasks = ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in runs)
    variables = {
        "SLURM_JOB_NODELIST": ",".join(written for written, _ in items),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_JOB_NUM_NODES": str(len(names)),
    }
    return variables, list(zip(names, counts, strict=True))


@given(allocations())
def test_whatever_slurm_writes_is_read_as_the_hostfile_that_lists_the_same(drawn):
    variables, expected = drawn
    equal, mistakes = parse_hosts(Source("hosts.txt", "\n".join(f"{name} slots={slots}" for name, slots in expected)))
    allocation, found = read("slurm", variables)
    if has_errors(mistakes):  # a name was drawn twice
        assert (None, {"T016"}) == (allocation, {one.code for one in found})
        return
    assert [] == found
    assert tuple(equal) == allocation.hosts
    assert equal == parse_hosts(Source("hosts.txt", allocation.as_hostfile()))[0]


@pytest.fixture(scope="module")
def _scontrol(skip_or_fail):
    if shutil.which("scontrol") is None:
        skip_or_fail("Slurm's own expansion needs Slurm's scontrol (Debian: slurm-client)")


@pytest.mark.usefixtures("_scontrol")
@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=allocations())
def test_scontrol_expands_every_list_of_nodes_alike(drawn, tmp_path):
    variables, _ = drawn
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=here\nSlurmctldHost=localhost\n")
    command = ["scontrol", "show", "hostnames", variables["SLURM_JOB_NODELIST"]]
    answer = subprocess.run(
        command, env=os.environ | {"SLURM_CONF": str(conf)}, capture_output=True, text=True, check=True, timeout=30
    )
    allocation, _ = read("slurm", variables)
    assert allocation is None or answer.stdout.split() == [host.name for host in allocation.hosts]


def test_a_heterogeneous_allocation_is_the_cluster_of_its_hostfile(tmp_path):
    allocation, _ = read("slurm", {"SLURM_JOB_NODELIST": "n[1-2],gpu", "SLURM_TASKS_PER_NODE": "2(x2),1"})
    (tmp_path / "slurm.txt").write_text("n1 slots=2\nn2 slots=2\ngpu slots=1\n")
    loaded = load_topology_files(tmp_path / "slurm.txt", None, environment={}, working_folder=tmp_path)
    assert loaded.topology.slots == allocation.topology.slots
    assert loaded.topology.hosts == allocation.topology.hosts


def test_names_are_expanded_with_the_last_bracket_first_as_scontrol_does():
    found = hosts_of("slurm", {"SLURM_JOB_NODELIST": "r[1-2]n[01-02],x", "SLURM_TASKS_PER_NODE": "1(x5)"})
    assert ["r1n01", "r1n02", "r2n01", "r2n02", "x"] == [name for name, _ in found]


def test_every_component_of_a_heterogeneous_job_is_read():
    environment = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_TASKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "g[1-2]",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4(x2)",
    }
    assert [("a", 1), ("g1", 4), ("g2", 4)] == hosts_of("slurm", environment)


def test_devices_of_a_slurm_job_are_read_with_their_ranges():
    environment = {"SLURM_JOB_NODELIST": "n", "SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_GPUS": "0-2,5"}
    allocation, found = read("slurm", environment)
    assert ((0, 1, 2, 5), []) == (allocation.devices, found)
    assert "# Devices on the host of the job's script: 0,1,2,5.\n" in allocation.as_hostfile()


def test_more_slots_than_devices_are_a_warning_with_the_command_that_changes_it():
    environment = {"SLURM_JOB_NODELIST": "n", "SLURM_TASKS_PER_NODE": "16", "SLURM_JOB_GPUS": "0,1"}
    allocation, found = read("slurm", environment)
    assert allocation is not None
    expected = """\
warning[P054]: host `n` gets 16 slots, and the job has 2 devices there
 --> $SLURM_TASKS_PER_NODE:1:1
  |
1 | 16
  | ^^ slots of the host

hint: for one rank a device: `--slots 2`"""
    assert expected == render(found)


def test_given_slots_replace_those_of_the_scheduler():
    assert [("a", 3), ("b", 3)] == hosts_of("slurm", {"SLURM_JOB_NODELIST": "a,b"}, slots=3)
    assert [("10.0.0.1", 3)] == hosts_of("dstack", {"DSTACK_NODES_IPS": "10.0.0.1"}, slots=3)
    assert [("w-0.w.ns.svc", 3)] == hosts_of("k8s", file="w-0.w.ns.svc slots=1\n", slots=3)


def test_skypilot_and_dstack_give_a_slot_for_each_device():
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NUM_NODES": "2"}
    assert [("10.0.0.1", 8), ("10.0.0.2", 8)] == hosts_of("skypilot", sky)
    dstack = {"DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2", "DSTACK_GPUS_PER_NODE": "2", "DSTACK_NODES_NUM": "2"}
    assert [("10.0.0.1", 2), ("10.0.0.2", 2)] == hosts_of("dstack", dstack)


def test_hosts_without_devices_have_one_slot():
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    assert [("10.0.0.1", 1)] == hosts_of("skypilot", sky)


def test_hostfiles_of_the_mpi_operator_are_read_in_both_of_its_forms():
    names = [f"pi-worker-{number}.pi.default.svc" for number in range(2)]
    open_mpi = "".join(f"{name} slots=2\n" for name in names)
    others = "".join(f"{name}:2\n" for name in names)
    assert [(name, 2) for name in names] == hosts_of("k8s", file=open_mpi) == hosts_of("k8s", file=others)


def test_ray_nodes_that_are_alive_are_read_with_the_head_first():
    nodes = """[
      {"node_ip": "10.0.0.2", "state": "ALIVE", "is_head_node": false, "resources_total": {"CPU": 8.0, "GPU": 4.0}},
      {"node_ip": "10.0.0.3", "state": "DEAD", "is_head_node": false, "resources_total": {}},
      {"node_ip": "10.0.0.1", "state": "ALIVE", "is_head_node": true, "resources_total": {"CPU": 8.0}}
    ]"""
    assert [("10.0.0.1", 1), ("10.0.0.2", 4)] == hosts_of("ray", file=nodes)


def test_ray_nodes_are_read_from_yaml_too():
    assert [("10.0.0.2", 1)] == hosts_of("ray", file="- node_ip: 10.0.0.2\n  state: ALIVE\n")


# Mistakes, each with its place.


@pytest.mark.parametrize("system", SYSTEMS)
def test_outside_of_an_allocation_the_message_says_where_to_run_the_command(system):
    allocation, found = read(system)
    assert (None, ["P054"], 1) == (allocation, [one.code for one in found], len(found[0].hints))


def test_tasks_of_another_number_of_hosts_show_both_variables():
    expected = """\
error[P054]: `SLURM_TASKS_PER_NODE` counts tasks of 1000001 hosts, and `SLURM_JOB_NODELIST` names 3
 --> $SLURM_TASKS_PER_NODE:1:1
  |
1 | 2(x999999),2(x2)
  | ^^^^^^^^^^^^^^^^
 --> $SLURM_JOB_NODELIST:1:1
  |
1 | n[1-3]
  | ------ 3 hosts
"""
    check({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x999999),2(x2)"}, expected)


def test_a_number_of_nodes_that_contradicts_the_list_shows_both_variables():
    expected = """\
error[P054]: `SLURM_JOB_NUM_NODES` is `2`, and `SLURM_JOB_NODELIST` names 3 hosts
 --> $SLURM_JOB_NUM_NODES:1:1
  |
1 | 2
  | ^
 --> $SLURM_JOB_NODELIST:1:1
  |
1 | n[1-3]
  | ------ 3 hosts
"""
    environment = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x3)"}
    check(environment, expected)


def test_a_bracket_without_a_partner_and_an_empty_item_are_marked_in_the_list():
    expected = """\
error[T014]: `SLURM_JOB_NODELIST` has no host here
 --> $SLURM_JOB_NODELIST:1:8
  |
1 | n[1-3],,g[1
  |        ^ expected a name

error[T014]: `g[1` cannot be a host name
 --> $SLURM_JOB_NODELIST:1:9
  |
1 | n[1-3],,g[1
  |         ^^^ a bracket has no partner
"""
    check({"SLURM_JOB_NODELIST": "n[1-3],,g[1"}, expected, codes=("T014", "T014"))


@pytest.mark.parametrize(
    ("tasks", "code", "column"),
    [("2(x2", "T005", 1), ("2(x0)", "T005", 1), ("1,0", "T013", 3), ("1,,1", "T005", 3), ("x(x2)", "T013", 1)],
)
def test_tasks_that_slurm_never_writes_are_marked(tasks, code, column):
    _, found = read("slurm", {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": tasks})
    assert [(code, column)] == [(one.code, one.primary.span.column) for one in found]


@pytest.mark.parametrize("devices", ["a", "0,0", "3-1", "0-99999999", "[0]"])
def test_numbers_of_devices_that_slurm_never_writes_are_marked(devices):
    environment = {"SLURM_JOB_NODELIST": "n", "SLURM_TASKS_PER_NODE": "1", "SLURM_JOB_GPUS": devices}
    _, found = read("slurm", environment)
    assert [("T005", "$SLURM_JOB_GPUS")] == [(one.code, one.primary.span.source.name) for one in found]


def test_a_host_that_is_listed_twice_is_marked_in_the_variable():
    _, found = read("dstack", {"DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.1"})
    assert [("T016", "$DSTACK_NODES_IPS", 2)] == [
        (one.code, one.primary.span.source.name, one.primary.span.line) for one in found
    ]


def test_a_name_that_ssh_would_take_for_an_option_is_refused():
    _, found = read("slurm", {"SLURM_JOB_NODELIST": "-oProxyCommand=x,n", "SLURM_TASKS_PER_NODE": "1(x2)"})
    assert ["T014"] == [one.code for one in found]


def test_a_list_of_ray_nodes_with_mistakes_marks_the_values():
    _, found = read("ray", file='[{"node_ip": "10.0.0.2", "state": "ALIVE", "resources_total": {"GPU": -4.5}}, 3]')
    assert [("T006", 79), ("T013", 71)] == [(one.code, one.primary.span.column) for one in found]


@pytest.mark.parametrize("text", ["{}", "[", "3", '[{"node_ip": "a", "state": "DEAD"}]'])
def test_a_file_without_a_node_that_is_alive_has_no_hosts(text):
    allocation, found = read("ray", file=text)
    assert (None, True) == (allocation, has_errors(found))


# Strangers' values: bounded in size, and whatever they are, the answer is diagnostics.


@pytest.mark.parametrize("nodes", ["n[1-99999999]", "n[1-65536][1-65536]", "n" * 20_000 + "[1-20000]"])
def test_a_short_list_of_millions_of_nodes_is_refused_before_it_is_made(nodes):
    tracemalloc.start()
    try:
        allocation, found = read("slurm", {"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": "1(x20000)"})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (None, True) == (allocation, has_errors(found))
    assert peak < 50 * 2**20


def test_a_long_list_of_opening_brackets_is_split_in_one_pass():
    _, found = read("slurm", {"SLURM_JOB_NODELIST": "[" * 100_000 + "," * 1000, "SLURM_TASKS_PER_NODE": "1"})
    assert has_errors(found)


SCRAPS = st.text(st.sampled_from("na0123456789[](),-x=:@ \n\x00\x1b\u2028é$"), max_size=30)


@given(st.sampled_from(SYSTEMS), SCRAPS, SCRAPS, SCRAPS)
def test_any_values_are_answered_with_hosts_or_with_diagnostics_that_can_be_drawn(system, names, counts, more):
    environment = {
        "SLURM_JOB_NODELIST": names,
        "SLURM_TASKS_PER_NODE": counts,
        "SLURM_JOB_GPUS": more,
        "SKYPILOT_NODE_IPS": names,
        "SKYPILOT_NUM_GPUS_PER_NODE": counts,
        "DSTACK_NODES_IPS": names,
        "DSTACK_NODES_NUM": counts,
    }
    allocation, found = read(system, environment, file=names if system in {"k8s", "ray"} else None)
    assert (allocation is None) == has_errors(found)
    assert render(found).replace("\n", "").isprintable()
    if allocation is not None:
        assert list(allocation.hosts) == parse_hosts(Source("hosts.txt", allocation.as_hostfile()))[0]
