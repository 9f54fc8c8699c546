"""What takes time in an elastic run on a virtual clock: steps of each number of workers, and the state that a worker gets."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import LOCAL, RunSpec
from ttlaunch.diagnostics import LaunchError
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, VirtualRun, run_each_virtually
from ttlaunch.lab.virtual_processes import ring_s
from ttlaunch.planning.fault_checks import targets_of
from ttlaunch.planning.faults import Fault, Verb
from ttlaunch.planning.launch_plan import LaunchPlan, RankRow
from ttlaunch.planning.routes import network_of
from ttlaunch.running.metrics.epoch_traffic import members_interval
from ttlaunch.spec.recipe.declare import Elastic

TIMED_STEPS = 3
"""So many steps of each number of workers are simulated, as many as without `--elastic`; or so many tasks for each worker of a server."""

_MOST_LEAD = 4
"""Workers that lead others do not wait in as many steps as the lead, which are simulated before those that count; a longer lead is not, because
then steps take as long as computing or as messages, whichever is longer."""

START_S = 5.0
"""How long a worker takes from its start until it can get the state, unless that is given: it imports torch."""

_NOTICED_S = 0.1  # the supervisor of a run looks a few times a second who has ended
_WORKERS = "multihost_config.num_workers"
_MOST_AHEAD = 16  # plans that are simulated together because they may be needed
_VALUE_BYTES = 4
_LEAST_MEANS, _MOST_MEANS, _MEANS_BYTES = 4, 32, 256 * 2**20  # kept by members for a worker that follows, as in a run
_WITHIN_S, _WITHIN_BYTES_PER_S = 50e-6, 8e9  # between workers of a host, as on the virtual clock of ranks


SimulatesEach = Callable[[Sequence[tuple[LaunchPlan, Conditions]]], Sequence[VirtualRun | LaunchError]]
"""Simulates plans, each with its conditions; returns the result of each, or why there is none."""

_Link = tuple[str, int]
"""A port of a worker where no network is known, else a directed link or the inside of a host: its kind, and whose or which."""


class WorkerCosts:
    """What takes time in an elastic run: steps as simulations of as many workers have them, and transfers over the same network.

    Attributes:
        start_s, notice_s, latency_s, most_means, state_bytes, mean_bytes, every: See `Costs`.
    """

    def __init__(
        self,
        spec: RunSpec,
        plan: LaunchPlan,
        conditions: Conditions,
        *,
        steps: int,
        form: Elastic | None = None,
        clock_gap: int = 0,
        simulate: SimulatesEach = run_each_virtually,
    ) -> None:
        """Simulate nothing yet.

        Args:
            spec: The run.
            plan: Its plan.
            conditions: What its machines and their network are like.
            steps: How many steps it makes.
            form: How the recipe lets workers come and go, where it is not as in `data_parallel`.
            clock_gap: By how many steps the fastest worker may lead the slowest.
            simulate: Simulates plans of workers that stay; by default in a process of their own, which imports torch.
        """
        assert plan.elastic is not None  # noqa: S101 - the caller has looked
        self._spec, self._plan, self._limits = spec, plan, plan.elastic
        self._conditions = replace(conditions, steps=min(steps, TIMED_STEPS))
        self._network = network_of(plan, over_links=conditions.over_links)
        self._runs: dict[tuple[Any, ...], VirtualRun] = {}
        self._simulate_each = simulate
        self._clock_gap = clock_gap
        self._has_tasks = bool(form and form.tasks_in_hand)
        self._as_roles = {role: place for place, role in enumerate(form.as_roles if form else ())}
        self._agreed_bytes = form.agreed_bytes if form else 0
        self.start_s, self.notice_s, self.latency_s = START_S, _NOTICED_S, conditions.link_us / 1e6
        self.state_bytes = self.mean_bytes = 0
        self.most_means, self.every = _MOST_MEANS, 1

    def look_ahead(self, faults: Sequence[Fault]) -> None:
        """Simulate, in one process, the numbers of workers that the faults may lead to."""
        begun = tuple(range(min(self._limits.first, self._limits.maximum)))
        possible = {self._key(one): one for one in [begun, *self._to_come(faults)]}
        self._simulate([*possible.values()][:_MOST_AHEAD])
        known = self.run_of(begun)
        config = self._plan.as_json()["config"]["training_config"]
        values, copies = known.facts["values"], 3 if config["optimizer"] == "adamw" else 2
        counters = known.facts["tensors"] if config["optimizer"] == "adamw" else 0
        self.mean_bytes = _VALUE_BYTES * values
        self.state_bytes = copies * self.mean_bytes + _VALUE_BYTES * counters
        if self._limits.has_local_steps:
            self.state_bytes = self._agreed_bytes * values
            # One worker alone would send nothing.
            self.every = members_interval(self._plan.as_json(), facts=[dict(known.facts)] * 2, blocks=[(0, 1), (1, 2)])
        self.most_means = max(_LEAST_MEANS, min(_MOST_MEANS, _MEANS_BYTES // max(1, self.mean_bytes)))

    def _to_come(self, faults: Sequence[Fault]) -> list[tuple[int, ...]]:
        """Return members that there may be: those that each fault leaves, and as many as come in their place or join."""
        first, limits, rows = self._limits.first, self._limits, self._plan.ranks[: self._limits.first]
        joins, left, found = 0, list(range(first)), []
        for fault in faults:
            joins += fault.verb is Verb.JOIN
            if fault.verb in {Verb.JOIN, Verb.CONTINUE}:
                continue
            hit = {row.rank for row in rows if row.host == fault.target.value} | {*targets_of(fault, rows)}
            left = [number for number in left if number not in hit] if hit else left[:-1]
            found.append(tuple(left))
        found += [tuple(range(count)) for count in range(len(left), first + joins + 1)]
        least = max(limits.minimum, 1 + limits.servers)
        return [one for one in found if least <= len(one) <= limits.maximum]

    def run_of(self, members: Sequence[int]) -> VirtualRun:
        """Return the simulation of some workers.

        Raises:
            LaunchError: They cannot be simulated.
        """
        key = self._key(members)
        if key not in self._runs:
            self._simulate([members])
        return self._runs[key]

    def step_s(self, members: Sequence[int], *, agrees: bool) -> float:
        local_ms, agreed_ms = self._steps_ms(members)
        return (agreed_ms if agrees else local_ms) / 1e3

    def task_s(self, number: int, members: Sequence[int]) -> float:
        run = self.run_of(members)
        ranks = dict(zip(members, self._in_places(run.plan.ranks), strict=True))
        [each] = [one.each_ms for one in run.groups if ranks[number].rank in one.members]
        later = each[1:] or each  # before its first one, a worker has also waited for the weights
        return sum(later) / len(later) / 1e3

    def mean_step_ms(self, members: Sequence[int]) -> float:
        """Return the time of a step of some workers, on average from one agreement, or update of a server, to the next."""
        if self._has_tasks:
            return 1e3 / sum(1 / self.task_s(number, members) for number in members[self._limits.servers :])
        local_ms, agreed_ms = self._steps_ms(members)
        return (local_ms * (self.every - 1) + agreed_ms) / self.every

    def _steps_ms(self, members: Sequence[int]) -> tuple[float, float]:
        """Return the time of a step without and with an agreement; the last step of a simulation, as of a training, has one."""
        run = self.run_of(members)
        if self.every == 1 or run.slowest is None:
            # In its first step, a rank that updates has also waited for the validation before it. Those that lead others wait for nothing in
            # as many steps as they may lead, and in the last one all wait for each other.
            counts = slice(1, None) if not self._clock_gap else slice(1 + min(self._clock_gap, _MOST_LEAD), -1)
            later = [one.each_ms[counts] or one.each_ms for one in run.groups if one.steps]
            step_ms = max((sum(each) / len(each) for each in later), default=0.0)
            if self._clock_gap:
                step_ms = max(step_ms, 1e3 * ring_s(self, members))
            return step_ms, step_ms
        each = run.slowest.each_ms
        return each[0], each[-1]

    def leaf_s(self, number: int) -> float:
        first = next(iter(self._runs.values()))
        return first.micro_batch_s * self._conditions.slow.get(number, 1.0)

    def transfers_s(self, gifts: Mapping[int, Mapping[int, float]]) -> Mapping[int, float]:
        """Return how long each transfer takes of those that begin together: as long as the link that carries most of what comes its way.

        Every link is shared until the last transfer over it is over, so this is the most that it can take.
        """
        gbps, load, paths = self._conditions.link_gbps, Counter[_Link](), {}
        for dest, sizes in gifts.items():
            found = [self._path(giver, dest) for giver in sizes]
            paths[dest] = found
            for (links, _), (giver, size) in zip(found, sizes.items(), strict=True):
                factor = max(self._conditions.slow_link.get(one, 1.0) for one in (giver, dest))
                for link in links:
                    load[link] += math.ceil(size * (factor if link[0] == "link" else 1.0))
        port = gbps * 1e9 / 8
        times = {}
        for dest, found in paths.items():
            latency_s = max((one for _, one in found), default=0.0)
            crossed = {link for links, _ in found for link in links}
            times[dest] = latency_s + max((load[link] / self._speed(link, port) for link in crossed), default=0.0)
        return times

    def _path(self, giver: int, dest: int) -> tuple[list[_Link], float]:
        """Return the links that a transfer crosses, and when its first byte arrives."""
        network, link_s = self._network, self._conditions.link_us / 1e6
        if network is None:
            return [("out", giver), ("in", dest)], link_s
        ends = network.places[giver], network.places[dest]
        if ends[0] == ends[1]:
            return [("within", dest)], _WITHIN_S
        route = network.routes[ends]
        return [("link", link) for link in route], sum(network.hops[link // 2] for link in route) * link_s

    def _speed(self, link: _Link, port: float) -> float:
        """Return the bytes in a second of a link."""
        kind, number = link
        if kind == "within":
            return _WITHIN_BYTES_PER_S
        if self._network is not None:
            return port * self._network.capacities[number // 2]
        return port / self._conditions.slow_link.get(number, 1.0)

    def _key(self, members: Sequence[int]) -> tuple[Any, ...]:
        rows, conditions = self._plan.ranks, self._conditions
        return tuple(
            (rows[one].host, rows[one].mesh_id, conditions.slow.get(one), conditions.slow_link.get(one))
            for one in members
        )

    def _simulate(self, wanted: Sequence[Sequence[int]]) -> None:
        plans = [self._plan_of(members) for members in wanted]
        orders = [(plan, self._conditions_of(members, plan.ranks)) for members, plan in zip(wanted, plans, strict=True)]
        for members, found in zip(wanted, self._simulate_each(orders), strict=True):
            if isinstance(found, LaunchError):
                raise found
            self._runs[self._key(members)] = found

    def _plan_of(self, members: Sequence[int]) -> LaunchPlan:
        """Return the plan of a run of as many workers, on the hosts of these."""
        local = replace(self._spec, elastic=None, ranks=None, on=LOCAL, hostfile=None, rank_bindings=None)
        count = len(members) - self._limits.servers
        spec = replace(local, overrides=(*self._spec.overrides, f"{_WORKERS}={count}"))
        plan = plan_simulation(spec, Unattended(), has_room=True)
        rows = [
            replace(self._plan.ranks[number], rank=own.rank, role=own.role, later=False)
            for number, own in zip(members, self._in_places(plan.ranks), strict=True)
        ]
        return replace(plan, ranks=tuple(sorted(rows, key=lambda row: row.rank)), links=self._plan.links)

    def _in_places(self, rows: Sequence[RankRow]) -> list[RankRow]:
        """Order ranks that stay as the members that do the same: those with the roles of the first places come first."""
        return sorted(rows, key=lambda row: (self._as_roles.get(row.role, len(self._as_roles)), row.rank))

    def _conditions_of(self, members: Sequence[int], rows: Sequence[RankRow]) -> Conditions:
        own = self._conditions
        places = [(row.rank, number) for row, number in zip(self._in_places(rows), members, strict=True)]
        slow, slow_link = (
            {place: given[number] for place, number in places if number in given} for given in (own.slow, own.slow_link)
        )
        steps = own.steps
        if self._clock_gap:  # see `_steps_ms` for those that do not count
            steps = TIMED_STEPS + min(self._clock_gap, _MOST_LEAD) + 2
        elif self._has_tasks:
            steps = TIMED_STEPS * (len(members) - self._limits.servers)
        return replace(own, slow=slow, slow_link=slow_link, steps=steps)
