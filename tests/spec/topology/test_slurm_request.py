"""What `--on slurm` and its options ask of Slurm, and the hosts that a plan has before Slurm gives any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.diagnostics import Source
from ttlaunch.spec.topology.allocation import read_allocation
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.model import Binding, MeshId, Rank, Topology
from ttlaunch.spec.topology.slurm_request import (
    SlurmRequest,
    check_devices,
    devices_of_job,
    is_slurm,
    parse_slurm_request,
    partition_of,
)

NOTHING = dict.fromkeys(("time_limit", "gres", "account", "qos"))


def ask(on="slurm:debug", *, nodes=None, ranks=None, per_host=None, **values):
    return parse_slurm_request(on, NOTHING | values, nodes=nodes, ranks=ranks, per_host=per_host)


def test_every_option_is_passed_to_slurm_in_its_own_words():
    request, found = ask(
        "slurm:gpu", nodes=2, ranks=5, time_limit="1-12:30", gres="gpu:a100:4", account="lab", qos="high"
    )
    assert [] == found
    expected = "--partition=gpu --nodes=2 --ntasks=5 --ntasks-per-node=3 --time=1-12:30 --gres=gpu:a100:4 --account=lab --qos=high"
    assert expected.split() == request.options()


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, (1,)),
        ({"nodes": 3}, (1, 1, 1)),
        ({"nodes": 2, "per_host": 4}, (4, 4)),
        ({"nodes": 2, "gres": "gpu:2"}, (2, 2)),
        ({"nodes": 2, "gres": "gpu"}, (1, 1)),
        ({"nodes": 2, "gres": "nic:1,gpu:a100:3"}, (3, 3)),
        ({"nodes": 4, "ranks": 5}, (2, 1, 1, 1)),
        ({"nodes": 2, "ranks": 2, "gres": "gpu:8"}, (1, 1)),
    ],
)
def test_hosts_get_the_ranks_that_were_asked_for_or_one_for_each_device(options, slots):
    request, found = ask(**options)
    assert ([], slots) == (found, request.slots)


@given(st.integers(1, 40), st.integers(0, 100))
def test_ranks_are_spread_evenly_and_slurm_is_asked_for_room_for_all(nodes, more):
    request, _ = ask(nodes=nodes, ranks=nodes + more)
    assert nodes + more == sum(request.slots)
    assert max(request.slots) - min(request.slots) <= 1
    hosts, found = parse_hosts(request.as_hosts())
    assert ([], list(request.slots)) == (found, [host.slots for host in hosts])
    variables = {
        "SLURM_JOB_NODELIST": f"n[1-{nodes}]" if nodes > 1 else "n1",
        "SLURM_TASKS_PER_NODE": ",".join(map(str, request.slots)),
    }
    allocation, found = read_allocation("slurm", environment=variables, file=None, slots=None)
    assert ([], list(request.slots)) == (found, [host.slots for host in allocation.hosts])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "slurm:"}, "a partition of `--on slurm:PARTITION` is ``; a name such as `gpu` was expected"),
        ({"on": "slurm:a b"}, "a partition of `--on slurm:PARTITION` is `a b`; a name such as `gpu` was expected"),
        (
            {"on": "slurm:--uid=0"},
            "a partition of `--on slurm:PARTITION` is `--uid=0`; a name such as `gpu` was expected",
        ),
        ({"time_limit": "soon"}, "`--time` is `soon`; minutes, `hours:minutes:seconds` or `days-hours` was expected"),
        *(
            (
                {"time_limit": text},
                f"`--time` is `{text}`; minutes, `hours:minutes:seconds` or `days-hours` was expected",
            )
            for text in ("-5", "1:99:99", "1:60", "99999999999999", "1-2:3:4:5", "1-", ":5")
        ),
        *(
            ({"gres": text}, f"`--gres` is `{text}`; `gpu:2` or `gpu:a100:2` was expected")
            for text in ("gpu:-1", "gpu:", ",gpu:1", "gpu::2")
        ),
        ({"gres": "gpu:2;x"}, "`--gres` is `gpu:2;x`; `gpu:2` or `gpu:a100:2` was expected"),
        ({"account": "-x"}, "`--account` is `-x`; a name was expected"),
        ({"qos": "a\nb"}, "`--qos` is `a\\nb`; a name was expected"),
        ({"nodes": 3, "ranks": 2}, "2 ranks were asked for on 3 hosts, and every host needs one"),
        ({"nodes": 3, "ranks": 1}, "1 rank was asked for on 3 hosts, and every host needs one"),
        ({"nodes": 3, "ranks": 4, "per_host": 2}, "`--ranks 4` was given but 2 on each of 3 hosts is 6"),
        ({"nodes": 65_537}, "`--nodes` is 65537; at most 65536 were expected"),
    ],
)
def test_an_option_that_slurm_could_not_understand_is_refused_before_it_is_asked(options, message):
    _, found = ask(**options)
    assert [message] == [one.message for one in found]


def test_the_word_slurm_and_a_partition_name_slurm_and_nothing_else_does():
    assert [True, True, False, False] == [is_slurm(on) for on in ("slurm", "slurm:gpu", "slurmish", "local")]
    assert [None, "gpu"] == [partition_of(on) for on in ("slurm", "slurm:gpu")]
    assert SlurmRequest() == ask("slurm")[0]


def on_devices(hosts, *environments):
    """A topology whose ranks have these variables."""
    place = Source("rank_bindings.yaml", "rank_bindings:\n").start()
    bindings = tuple(Binding(Rank(rank), MeshId(rank), place, environment=one) for rank, one in enumerate(environments))
    return Topology("slurm", None, tuple(parse_hosts(Source("hosts.txt", hosts))[0]), bindings=bindings)


FOUR = [{"TT_VISIBLE_DEVICES": "0"}, {"TT_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {}]


@pytest.mark.parametrize(
    ("each", "given", "message"),
    [
        (2, {}, None),
        (0, {}, None),
        (1, {}, "the ranks of a host name 2 devices, and Slurm is asked for 1 of each host"),
        (0, {"a": (0, 1), "b": (4, 6)}, None),
        (0, {"a": (2, 3)}, None),
        (0, {"a": (5,)}, "rank 1 names device 1, which the Slurm job does not have on `a`"),
        (0, {"a": (0, 1), "b": (3,)}, "rank 2 names device 1, which the Slurm job does not have on `b`"),
    ],
)
def test_bindings_that_name_other_devices_than_slurm_gives_are_refused(each, given, message):
    found = check_devices(on_devices("a slots=2\nb slots=2\n", *FOUR), each=each, given=given)
    assert ([message] if message else []) == [one.message for one in found]


def test_hosts_without_named_devices_fit_whatever_slurm_gives():
    assert [] == check_devices(on_devices("a slots=2\n", {}, {"TT_VISIBLE_DEVICES": "all"}), each=1, given={"a": (7,)})


# As `scontrol --oneliner --details show job` of Slurm 22.05 prints it.
SHOWN = (
    "JobId=7 JobName=x NodeList=n[1-3],m4 NumNodes=4 TRES=cpu=4,gres/gpu=6 JOB_GRES=gpu:6"
    "   Nodes=n[1-2] CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0,3)   Nodes=n3,m4 CPU_IDs=0 Mem=0 GRES=gpu:a100:1(IDX:2),shard:4(IDX:1) Power="
)


def test_the_devices_of_every_host_of_a_job_are_read_from_what_slurm_shows():
    assert {"n1": (0, 3), "n2": (0, 3), "n3": (2,), "m4": (2,)} == devices_of_job(SHOWN)


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Nodes=n1 CPU_IDs=0 Mem=0 GRES=",
        "Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:N/A)",
        "Nodes=n[1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)",
        "Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0-99999999)",
        "Comment=Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)",
    ],
)
def test_devices_that_slurm_does_not_say_are_not_known(shown):
    assert {} == devices_of_job(shown)
