"""Messages over links that ranks share, with times that are counted by hand."""

import torch

from ttlaunch.runtime.comm.routes import WITHIN_BYTES_PER_S, WITHIN_S, Routes
from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.comm.virtual_world import VirtualWorld

WORDS = 4  # of 4 bytes, which pass in 1 s


def ends(routes, *messages, ranks):
    """Send messages that begin at once, named in the order in which they arrive; return when each arrives."""
    clock = VirtualClock(range(ranks))
    link = Link(0.5, 16.0, {}, routes)
    world = VirtualWorld(["peer"] * ranks, clock, link)
    arrived = {}

    def peer(rank):
        comm = world.communicator(rank)
        sent = [comm.isend(torch.zeros(WORDS), dest=b) for a, b in messages if a == rank]
        for pair, one in [
            (pair, comm.irecv(torch.zeros(WORDS), source=pair[0])) for pair in messages if pair[1] == rank
        ]:
            one.wait()
            arrived[pair] = clock.now_s(rank)
        for one in sent:
            one.wait()

    outcome = world.run({rank: lambda rank=rank: peer(rank) for rank in range(ranks)})
    assert ({}, []) == (outcome.errors, outcome.findings)
    return [arrived[pair] for pair in messages]


def chain(*channels):
    """Places in a row: link k joins place k with the next one."""
    routes = {}
    for a in range(len(channels) + 1):
        for b in range(a + 1, len(channels) + 1):
            routes[a, b] = tuple(2 * link for link in range(a, b))
            routes[b, a] = tuple(2 * link + 1 for link in reversed(range(a, b)))
    speeds = {link: 16.0 * channels[link // 2] for link in range(2 * len(channels))}
    return routes, speeds, dict.fromkeys(speeds, 0.25)


def test_messages_share_the_links_that_both_cross_and_no_others():
    """0 to 2 and 1 to 2 share the second link, so each has half of it; 2 to 0 goes the other way."""
    routes = Routes((0, 1, 2), *chain(1, 1))
    assert [1.5, 2.25, 2.5] == ends(routes, (2, 0), (1, 2), (0, 2), ranks=3)


def test_a_link_with_more_channels_carries_more():
    routes = Routes((0, 1, 2), *chain(2, 4))
    assert [0.5 + 0.5] == ends(routes, (0, 2), ranks=3)
    assert [0.25 + 0.5, 0.5 + 0.5] == ends(routes, (1, 2), (0, 2), ranks=3)  # both have half of the second one


def test_ranks_of_one_place_need_no_link():
    routes = Routes((0, 0, 1), *chain(1))
    assert [WITHIN_S + 16 / WITHIN_BYTES_PER_S, 1.25] == ends(routes, (0, 1), (1, 2), ranks=3)


def test_a_pair_without_a_route_uses_the_ports_of_its_ranks():
    assert [1.5] == ends(Routes((0, 1), {}, {}, {}), (0, 1), ranks=2)
