"""Which network the ranks talk over: found without those that lead nowhere, in CIDR, and explained."""

import pytest

from ttlaunch.hosts.doctor.network import check_choice, choose_network
from ttlaunch.hosts.doctor.pair_checks import LOST, check_mtu, check_pairs
from ttlaunch.hosts.doctor.pairs import Pair, plan_rounds


@pytest.fixture
def choose(facts, interface):
    """`choose({"a": ["eth0 10.0.0.1/24"], …})`: the choice among hosts with these interfaces."""

    def parse(text):
        name, address, *rest = text.split()
        options = dict(part.split("=") for part in rest)
        speed = int(options["speed"]) if "speed" in options else None
        return interface(
            address, name=name, up=options.get("up") != "no", speed_mbit=speed, mtu=int(options.get("mtu", 1500))
        )

    def make(hosts, **options):
        known = {
            host: facts(1, machine=host, interfaces=tuple(parse(text) for text in ["lo 127.0.0.1/8", *texts]))
            for host, texts in hosts.items()
        }
        return choose_network(known, **options)

    return make


def test_container_networks_and_addresses_that_several_hosts_have_do_not_count(choose):
    choice = choose(
        {
            "a": ["docker0 172.17.0.1/16 speed=99000", "strange0 192.168.1.1/24 speed=99000", "eth0 10.0.0.1/24"],
            "b": ["docker0 172.17.0.1/16 speed=99000", "strange0 192.168.1.1/24 speed=99000", "eth0 10.0.0.2/24"],
        }
    )

    assert ("10.0.0.0/24",) == choice.ranks
    assert {"a": "10.0.0.1", "b": "10.0.0.2"} == choice.addresses
    assert "10.0.0.0/24 is the only network that all 2 hosts share" == choice.why


@pytest.mark.parametrize(
    "useless",
    [
        "virbr0 10.9.0.{}/24",
        "br-1f2e 10.9.0.{}/24",
        "veth12 10.9.0.{}/24",
        "cni0 10.9.0.{}/24",
        "flannel.1 10.9.0.{}/24",
        "eth9 169.254.3.{}/16",
        "eth9 10.9.0.{}/24 up=no",
    ],
)
def test_interfaces_that_lead_nowhere_are_ignored(choose, useless):
    hosts = {f"h{n}": [f"{useless.format(n)} speed=400000", f"eth0 10.0.0.{n}/24 speed=1000"] for n in (1, 2)}

    assert ("10.0.0.0/24",) == choose(hosts).ranks


def test_interfaces_may_have_other_names_on_other_hosts(choose):
    assert ("10.0.0.0/24",) == choose({"a": ["eth0 10.0.0.1/24"], "b": ["enp3s0f1 10.0.0.2/24"]}).ranks


def test_the_fastest_network_wins_over_the_one_that_ssh_uses(choose):
    hosts = {f"h{n}": [f"eth0 10.0.0.{n}/24 speed=1000", f"eth1 10.1.0.{n}/24 speed=100000"] for n in (1, 2)}
    connections = {"h1": ("10.0.0.9", "10.0.0.1"), "h2": ("10.0.0.9", "10.0.0.2")}

    choice = choose(hosts, connections=connections)

    assert ("10.1.0.0/24",) == choice.ranks
    assert ("10.0.0.0/24",) == choice.control
    assert (
        "10.1.0.0/24 is the fastest of those that all 2 hosts share (100,000 Mbit/s), before 10.0.0.0/24" == choice.why
    )


def test_of_equally_fast_networks_the_one_that_ssh_uses_wins(choose):
    hosts = {f"h{n}": [f"eth0 10.0.0.{n}/24", f"eth1 10.1.0.{n}/24"] for n in (1, 2)}
    connections = {"h1": ("10.1.0.9", "10.1.0.1"), "h2": ("10.1.0.9", "10.1.0.2")}

    choice = choose(hosts, connections=connections)

    assert ("10.1.0.0/24",) == choice.ranks
    assert "10.1.0.0/24 is taken because SSH uses it; all 2 hosts also share 10.0.0.0/24" == choice.why


def test_two_networks_that_could_both_be_meant_are_named_unless_speed_ssh_or_the_user_decides(choose):
    hosts = {f"h{n}": [f"eth0 10.0.0.{n}/24", f"eth1 10.1.0.{n}/24"] for n in (1, 2)}
    connections = {"h1": ("10.1.0.9", "10.1.0.1"), "h2": ("10.1.0.9", "10.1.0.2")}
    [found] = check_choice(choose(hosts))
    assert "ranks use the network 10.0.0.0/24, and nothing says that 10.1.0.0/24 is not meant" == found.message
    assert ("H042", "warning") == (found.code, str(found.severity))
    faster = {host: [eth0, f"{eth1} speed=100000"] for host, (eth0, eth1) in hosts.items()}
    for choice in (choose(hosts, connections=connections), choose(hosts, wanted="10.0.0.0/24"), choose(faster)):
        assert [] == check_choice(choice)


def test_one_network_with_two_lengths_of_prefix_is_one_network(choose):
    choice = choose({"a": ["eth0 10.0.0.1/16"], "b": ["eth0 10.0.0.2/24"]})

    assert {"a": "10.0.0.1", "b": "10.0.0.2"} == choice.addresses
    assert ("10.0.0.0/16",) == choice.ranks


def test_hosts_in_different_networks_may_route_to_each_other(choose):
    connections = {"a": ("10.9.0.1", "10.0.1.1"), "b": ("10.9.0.1", "10.0.2.1")}
    hosts = {"a": ["eth0 10.0.1.1/24", "eth1 192.168.7.1/24 speed=50000"], "b": ["ens1 10.0.2.1/24"]}

    choice = choose(hosts, connections=connections)

    assert ("10.0.1.0/24", "10.0.2.0/24") == choice.ranks
    assert ("10.0.1.0/24", "10.0.2.0/24", "10.9.0.1/32") == choice.control
    assert "no network is shared by all hosts; they may route to each other: 10.0.1.0/24 and 10.0.2.0/24" == choice.why


@pytest.mark.parametrize("wanted", ["10.1.0.0/24", "10.1.0.9/24", "ib0"])
def test_the_network_of_cluster_yaml_is_taken_by_name_or_cidr(choose, wanted):
    hosts = {f"h{n}": [f"eth0 10.0.0.{n}/24 speed=9000", f"ib0 10.1.0.{n}/24"] for n in (1, 2)}

    choice = choose(hosts, wanted=wanted)

    assert ("10.1.0.0/24",) == choice.ranks
    assert f"cluster.yaml asks for {wanted}" == choice.why


def test_a_host_without_the_wanted_interface_shows_what_it_has(choose, check):
    found = choose({"a": ["ib0 10.1.0.1/24"], "b": ["eth0 10.0.0.2/24", "eth1 10.1.0.2/24"]}, wanted="ib0")

    check(
        [found],
        """
        error[H027]: `b` has no interface `ib0`, the `network` of cluster.yaml
         = note: b: eth0 10.0.0.2/24 and eth1 10.1.0.2/24

        hint: all 2 hosts share 10.1.0.0/24: `network: 10.1.0.0/24` in cluster.yaml
        """,
    )


def test_a_host_with_nothing_but_docker_has_no_network(choose, check):
    found = choose({"a": ["eth0 10.0.0.1/24"], "b": ["docker0 172.17.0.1/16"]})

    check(
        [found],
        """
        error[H027]: `b` has no address that other hosts could reach
         = note: a: eth0 10.0.0.1/24
         = note: b: no interface that counts

        hint: `network: 10.0.0.0/24` in cluster.yaml, with the network that joins them
        """,
    )


@pytest.mark.parametrize("wanted", ["lo", "127.0.0.0/8"])
def test_loopback_is_refused_as_such(choose, check, wanted):
    found = choose({"a": ["eth0 192.168.1.1/24"], "b": ["eth0 192.168.1.2/24"]}, wanted=wanted)

    check(
        [found],
        f"""
        error[H027]: `{wanted}`, the `network` of cluster.yaml, is loopback: it leads to no other host
         = note: a: eth0 192.168.1.1/24
         = note: b: eth0 192.168.1.2/24

        hint: all 2 hosts share 192.168.1.0/24: `network: 192.168.1.0/24` in cluster.yaml
        """,
    )


def test_one_host_needs_no_network(choose):
    choice = choose({"a": []})

    assert (("127.0.0.0/8",), "all ranks run on one machine") == (choice.ranks, choice.why)


def test_a_host_behind_an_address_translation_leaves_daemons_the_networks_of_the_ranks(choose):
    connections = {"a": ("192.0.2.1", "198.51.100.7"), "b": ("192.0.2.1", "198.51.100.8")}

    choice = choose({"a": ["eth0 10.0.0.1/24"], "b": ["eth0 10.0.0.2/24"]}, connections=connections)

    assert ("10.0.0.0/24", "192.0.2.1/32") == choice.control


def pairs(hosts, broken, problem="no answer"):
    """Every one-way connection between hosts, of which these do not work."""
    ways = [(a, b) for a in hosts for b in hosts if a != b]
    return [Pair(a, b, None, problem) if (a, b) in broken else Pair(a, b, 0.001) for a, b in ways]


@pytest.fixture
def three(choose):
    return choose({f"metal-0{n}": [f"eth0 10.0.0.{n}/24"] for n in (1, 2, 3)})


def test_a_pair_that_is_cut_off_is_named_by_both_ends(three, topology, check):
    ways = pairs(three.addresses, {("metal-01", "metal-03"), ("metal-03", "metal-01")})

    check(
        check_pairs(ways, three, topology=topology(3)),
        """
        error[H028]: `metal-01` and `metal-03` cannot talk to each other on 10.0.0.0/24; nothing was started
         --> hosts.txt:1:1
          |
        1 | metal-01 slots=1
          | ^^^^^^^^ 10.0.0.1
         --> hosts.txt:3:1
          |
        3 | metal-03 slots=1
          | -------- 10.0.0.3
          = note: from metal-01 to metal-03: no answer
          = note: from metal-03 to metal-01: no answer

        hint: open ports 1024 to 65535 between these hosts in their firewalls, or choose another network: `network: 10.0.0.0/24` in cluster.yaml
        """,
    )


def test_a_host_that_is_cut_off_from_all_is_named_alone(three, topology):
    ways = pairs(three.addresses, {(a, b) for a in three.addresses for b in three.addresses if "metal-02" in {a, b}})

    found = check_pairs(ways, three, topology=topology(3))

    assert ["no other host gets through to and from `metal-02` on 10.0.0.0/24; nothing was started"] == [
        one.message for one in found
    ]


def test_some_ways_without_a_pattern_are_counted(three, topology):
    ways = pairs(three.addresses, {("metal-01", "metal-02"), ("metal-02", "metal-03")})

    assert ["2 of 6 one-way connections between hosts do not work on 10.0.0.0/24; nothing was started"] == [
        one.message for one in check_pairs(ways, three, topology=topology(3))
    ]


def test_large_packets_that_are_lost_are_another_matter(three, topology):
    ways = pairs(three.addresses, {("metal-01", "metal-02")}, problem=LOST)

    assert [
        ("H029", "between `metal-01` and `metal-02` large packets are lost on 10.0.0.0/24; nothing was started")
    ] == [(one.code, one.message) for one in check_pairs(ways, three, topology=topology(3))]


def test_another_mtu_on_one_host_is_a_warning(choose, topology, check):
    choice = choose(
        {"metal-01": ["eth0 10.0.0.1/24 mtu=9000"], **{f"metal-0{n}": [f"eth0 10.0.0.{n}/24"] for n in (2, 3)}}
    )

    check(
        check_mtu(choice, topology=topology(3)),
        """
        warning[H029]: host `metal-01` has MTU 9000 on the chosen network, the others have 1500
         --> hosts.txt:1:1
          |
        1 | metal-01 slots=1
          | ^^^^^^^^ eth0 has MTU 9000
          = note: messages between ranks pass, but may be slow; a switch that cannot fragment packets drops those that are too large

        hint: `ssh metal-01 sudo ip link set eth0 mtu 1500`
        """,
    )


@pytest.mark.parametrize("count", range(2, 12))
def test_in_rounds_everybody_meets_everybody_once_and_never_two_at_a_time(count):
    hosts = [f"h{n}" for n in range(count)]

    rounds = plan_rounds(hosts)

    met = sorted(tuple(sorted(match)) for matches in rounds for match in matches)
    assert sorted((a, b) for a in hosts for b in hosts if a < b) == met
    for matches in rounds:
        busy = [host for match in matches for host in match]
        assert len(set(busy)) == len(busy)


def test_ranks_of_a_single_host_use_its_network_if_other_machines_have_to_reach_them(choose):
    host = {"a": ["docker0 172.17.0.1/16", "eth0 10.0.0.1/24"]}
    assert {"a": "127.0.0.1"} == choose(host).addresses
    assert {"a": "10.0.0.1"} == choose(host, takes_others=True).addresses
