"""What takes time in an elastic run on a virtual clock: steps of each number of workers, and the state that a worker gets."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import LOCAL, RunSpec
from ttlaunch.diagnostics import LaunchError
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, VirtualRun, run_each_virtually
from ttlaunch.planning.fault_checks import targets_of
from ttlaunch.planning.faults import Fault, Verb
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.planning.routes import network_of

TIMED_STEPS = 3
"""So many steps of each number of workers are simulated, as many as without `--elastic`."""

START_S = 5.0
"""How long a worker takes from its start until it can get the state, unless that is given: it imports torch."""

_NOTICED_S = 0.1  # the supervisor of a run looks a few times a second who has ended
_WORKERS = "multihost_config.num_workers"
_MOST_AHEAD = 16  # plans that are simulated together because they may be needed
_VALUE_BYTES = 4
_LEAST_MEANS, _MOST_MEANS, _MEANS_BYTES = 4, 32, 256 * 2**20  # kept by members for a worker that follows, as in a run
_WITHIN_S, _WITHIN_BYTES_PER_S = 50e-6, 8e9  # between workers of a host, as on the virtual clock of ranks


class WorkerCosts:
    """What takes time in an elastic run: steps as simulations of as many workers have them, and transfers over the same network.

    Attributes:
        start_s, notice_s, latency_s, most_means: See `Costs`.
        state_bytes, mean_bytes: The bytes of a state, weights and what the optimizer keeps of them, and of a mean gradient.
    """

    def __init__(self, spec: RunSpec, plan: LaunchPlan, conditions: Conditions, *, steps: int) -> None:
        """Simulate the workers that start with the run.

        Raises:
            LaunchError: They cannot be simulated.
        """
        assert plan.elastic is not None  # noqa: S101 - the caller has looked
        self._spec, self._plan, self._limits = spec, plan, plan.elastic
        self._conditions = replace(conditions, steps=min(steps, TIMED_STEPS))
        self._network = network_of(plan, over_links=conditions.over_links)
        self._runs: dict[tuple[Any, ...], VirtualRun] = {}
        self.start_s, self.notice_s, self.latency_s = START_S, _NOTICED_S, conditions.link_us / 1e6
        self.state_bytes = self.mean_bytes = 0
        self.most_means = _MOST_MEANS

    def look_ahead(self, faults: Sequence[Fault]) -> None:
        """Simulate, in one process, the numbers of workers that the faults may lead to."""
        first, limits = self._limits.first, self._limits
        joins = sum(one.verb is Verb.JOIN for one in faults)
        gone = sum(
            max(1, len(targets_of(one, self._plan.ranks[:first]))) for one in faults if one.verb is not Verb.JOIN
        )
        least = max(1, limits.minimum, first - gone, first + joins - _MOST_AHEAD)
        numbers = [first, *(one for one in range(least, min(limits.maximum, first + joins) + 1) if one != first)]
        self._simulate([tuple(range(count)) for count in numbers[:_MOST_AHEAD] if count <= limits.maximum])
        known = self.run_of(range(min(first, limits.maximum)))
        config = self._plan.as_json()["config"]["training_config"]
        values, copies = known.facts["values"], 3 if config["optimizer"] == "adamw" else 2
        counters = known.facts["tensors"] if config["optimizer"] == "adamw" else 0
        self.mean_bytes = _VALUE_BYTES * values
        self.state_bytes = copies * self.mean_bytes + _VALUE_BYTES * counters
        self.most_means = max(_LEAST_MEANS, min(_MOST_MEANS, _MEANS_BYTES // max(1, self.mean_bytes)))

    def run_of(self, members: Sequence[int]) -> VirtualRun:
        """Return the simulation of some workers.

        Raises:
            LaunchError: They cannot be simulated.
        """
        key = self._key(members)
        if key not in self._runs:
            self._simulate([members])
        return self._runs[key]

    def step_s(self, members: Sequence[int]) -> float:
        return (self.run_of(members).step_ms or 0.0) / 1e3

    def leaf_s(self, number: int) -> float:
        first = next(iter(self._runs.values()))
        return first.micro_batch_s * self._conditions.slow.get(number, 1.0)

    def state_s(self, number: int, members: Sequence[int]) -> float:
        return self._transfer_s(number, members, self.state_bytes)

    def mean_s(self, number: int, members: Sequence[int]) -> float:
        return self._transfer_s(number, members, self.mean_bytes)

    def _transfer_s(self, number: int, members: Sequence[int], size: int) -> float:
        """Return how long equal parts travel at the same time: as long as the link takes that carries most."""
        givers = [one for one in members if one != number]
        part = size / max(1, len(givers))
        conditions, network = self._conditions, self._network
        port = conditions.link_gbps * 1e9 / 8
        if network is None:
            slow = conditions.slow_link
            longest = max([size * slow.get(number, 1.0), *(part * slow.get(one, 1.0) for one in givers)])
            return conditions.link_us / 1e6 + longest / port
        load, latency_s, within = Counter[int](), 0.0, 0.0
        for giver in givers:
            ends = network.places[giver], network.places[number]
            if ends[0] == ends[1]:
                within, latency_s = within + part, max(latency_s, _WITHIN_S)
                continue
            route = network.routes[ends]
            factor = max(conditions.slow_link.get(one, 1.0) for one in (giver, number))
            latency_s = max(latency_s, sum(network.hops[link // 2] for link in route) * conditions.link_us / 1e6)
            for link in route:
                load[link] += math.ceil(part * factor)
        over_links = max((size / (port * network.capacities[link // 2]) for link, size in load.items()), default=0.0)
        return latency_s + max(over_links, within / _WITHIN_BYTES_PER_S)

    def _key(self, members: Sequence[int]) -> tuple[Any, ...]:
        rows, conditions = self._plan.ranks, self._conditions
        return tuple(
            (rows[one].host, rows[one].mesh_id, conditions.slow.get(one), conditions.slow_link.get(one))
            for one in members
        )

    def _simulate(self, wanted: Sequence[Sequence[int]]) -> None:
        orders = [(self._plan_of(members), self._conditions_of(members)) for members in wanted]
        for members, found in zip(wanted, run_each_virtually(orders), strict=True):
            if isinstance(found, LaunchError):
                raise found
            self._runs[self._key(members)] = found

    def _plan_of(self, members: Sequence[int]) -> LaunchPlan:
        """Return the plan of a run of as many workers, on the hosts of these."""
        local = replace(self._spec, elastic=None, ranks=None, on=LOCAL, hostfile=None, rank_bindings=None)
        spec = replace(local, overrides=(*self._spec.overrides, f"{_WORKERS}={len(members)}"))
        plan = plan_simulation(spec, Unattended(), has_room=True)
        rows = [
            replace(self._plan.ranks[number], rank=own.rank, role=own.role, later=False)
            for number, own in zip(members, plan.ranks, strict=True)
        ]
        return replace(plan, ranks=tuple(rows), links=self._plan.links)

    def _conditions_of(self, members: Sequence[int]) -> Conditions:
        own, places = self._conditions, list(enumerate(members))
        slow, slow_link = (
            {place: given[number] for place, number in places if number in given} for given in (own.slow, own.slow_link)
        )
        return replace(own, slow=slow, slow_link=slow_link)
