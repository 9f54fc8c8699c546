"""Read the hosts of an allocation from what a scheduler has set for its jobs: Slurm, SkyPilot, dstack, Kubernetes, Ray.

The environment and the text of a file are arguments. The hosts have their places in the variables that name them, so a rule
that fails later can point there, and they are equal to the hosts of the hostfile that `as_hostfile` writes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.diagnostic import Blame, Diagnostic, Label, Severity, has_errors, mistake_at
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.host_names import expand_ranges
from ttlaunch.spec.topology.hosts import MOST_HOSTS_IN_ALL, HostLine, join_lines, parse_count, parse_hosts, parse_names
from ttlaunch.spec.topology.model import Host, Topology

if TYPE_CHECKING:
    from ttlaunch.spec.located.nodes import Node

NO_ALLOCATION = "P054"
_MARK = re.compile(r"[,\[\]]")
_WORD = re.compile(r"\S+")
_TASKS = re.compile(r"(?P<count>[^,()]+)(?:\(x(?P<repeat>[1-9][0-9]{0,5})\))?\Z")
_NAME_AND_COUNT = re.compile(r"(?P<name>[^\s:]+):(?P<count>[0-9]+)\Z")
_MOST_COMPONENTS = 1024
_TITLES = {"slurm": "Slurm", "skypilot": "SkyPilot", "dstack": "dstack", "k8s": "Kubernetes", "ray": "Ray"}
_HOW_TO_ENTER = {
    "slurm": "run this in the script of `sbatch`, or in the shell of `salloc`",
    "skypilot": "run this in the `run:` section of a SkyPilot task",
    "dstack": "run this in the `commands:` of a dstack task with `nodes:`",
    "k8s": "run this in the launcher pod of an MPIJob, or name its hostfile: `ttlaunch hosts --from k8s FILE`",
    "ray": "`ray list nodes --format json | ttlaunch hosts --from ray -`",
}
SYSTEMS = tuple(_TITLES)
"""The systems whose allocations can be read."""
OPERATORS_HOSTFILE = "/etc/mpi/hostfile"
"""Where the MPI Operator mounts the hostfile in a launcher pod."""


@dataclass(frozen=True)
class Allocation:
    """The hosts that a scheduler has given to a job.

    Attributes:
        system: One of `SYSTEMS`.
        hosts: The hosts in the scheduler's order, in which ranks fill them.
        devices: The numbers of the devices that the job has on the host of its script; empty if the scheduler set none.
        read: The variables or the file that the hosts come from.
    """

    system: str
    hosts: tuple[Host, ...]
    devices: tuple[int, ...]
    read: tuple[str, ...]

    @property
    def topology(self) -> Topology:
        """Return the allocation as a cluster whose files leave the number of ranks open."""
        return Topology(self.system, None, self.hosts)

    def as_hostfile(self) -> str:
        """Return a hostfile with the same hosts and slots."""
        title = (
            f"# Hosts of an allocation by {_TITLES[self.system]}, read from {shown(', '.join(self.read), longest=300)}."
        )
        devices = [f"# Devices on the host of the job's script: {','.join(map(str, self.devices))}."]
        lines = [f"{host.user}@{host.name}" if host.user else host.name for host in self.hosts]
        slots = [f"{line} slots={host.slots}" for line, host in zip(lines, self.hosts, strict=True)]
        return "\n".join([title, *(devices if self.devices else []), *slots, ""])


@dataclass
class _Reading:
    """What is read of an allocation, with the mistakes.

    Attributes:
        given_slots: The number of slots of every host that the user gave; None to take what the scheduler says.
    """

    system: str
    environment: Mapping[str, str]
    given_slots: int | None
    lines: list[HostLine] = field(default_factory=list)
    devices: tuple[int, ...] = ()
    read: list[str] = field(default_factory=list)
    found: list[Diagnostic] = field(default_factory=list)

    def variable(self, name: str) -> Source | None:
        """Return the value of a variable; None if it is not set or empty."""
        value = self.environment.get(name, "")
        if not value.strip():
            return None
        self.read += [name]
        return Source(f"${name}", value.replace("\r\n", "\n"))

    def required(self, name: str) -> Source | None:
        """Return the value of a variable without which there is no allocation, or report that it is missing."""
        source = self.variable(name)
        if source is None:
            title = _TITLES[self.system]
            conclusion = f"so this process is in no allocation by {title}"
            if self.read:  # somebody has passed on one of them alone
                conclusion = f"and {title} sets it together with `{self.read[-1]}`, which is"
            message = f"`{name}` is not set, {conclusion}"
            hints = (_HOW_TO_ENTER[self.system],)
            self.found.append(Diagnostic(NO_ALLOCATION, message, hints=hints, blame=Blame.COMMAND_LINE))
        return source

    def add(self, names: Iterable[HostLine], slots: int, span: Span | None = None) -> None:
        """Add hosts with the number of slots that stands at a place, or that the name of each host implies."""
        slots = slots if self.given_slots is None else self.given_slots
        self.lines += [replace(line, counts={"slots": (slots, span or line.span)}) for line in names]

    def contradicts(self, message: str, span: Span, other: tuple[Span, str] | None = None) -> None:
        self.found.append(mistake_at(NO_ALLOCATION, message, span, other=other))

    def names(self, source: Source, items: "Iterable[tuple[str, Span]]") -> list[HostLine]:
        """Return the hosts that the items of a variable name, and report the items that name none."""
        lines: list[HostLine] = []
        for word, span in items:
            if not word:
                message = f"`{source.name[1:]}` has no host here"
                self.found.append(mistake_at(codes.HOST_NAME, message, span, label="expected a name"))
                continue
            read, mistakes = parse_names(word, span)
            lines += read
            self.found += mistakes
            if len(self.lines) + len(lines) > MOST_HOSTS_IN_ALL:
                message = f"the allocation has more than {MOST_HOSTS_IN_ALL} hosts"
                self.found.append(mistake_at(codes.SLOTS, message, span, label="up to here"))
                break
        return lines

    def check_number(self, name: str, hosts: int, of: Source) -> None:
        """Report a variable with the number of hosts that contradicts the list of them."""
        source = self.variable(name)
        if source is not None and source.text.strip() != str(hosts):
            message = f"`{name}` is `{shown(source.text)}`, and `{of.name[1:]}` names {counted(hosts, 'host')}"
            self.contradicts(message, source.start(), (of.start(), counted(hosts, "host")))


def read_allocation(
    system: str, *, environment: Mapping[str, str], file: Source | None = None, slots: int | None = None
) -> tuple[Allocation | None, list[Diagnostic]]:
    """Read the hosts of an allocation.

    Args:
        system: One of `SYSTEMS`.
        environment: The variables of a process of the job.
        file: For `k8s`, the hostfile of the launcher pod; for `ray`, what `ray list nodes --format json` printed.
        slots: The number of slots of every host; None for the scheduler's number: its tasks, or else its devices, or else 1.

    Returns:
        The allocation, or None if there is an error; and the diagnostics.
    """
    reading = _Reading(system, environment, slots)
    if file is None and system in {"k8s", "ray"}:
        message = f"a file lists the hosts of {_TITLES[system]}, and none was given"
        return None, [Diagnostic(NO_ALLOCATION, message, hints=(_HOW_TO_ENTER[system],), blame=Blame.COMMAND_LINE)]
    if file is not None:
        reading.read += [file.name]
        (_read_k8s if system == "k8s" else _read_ray)(reading, file)
    else:
        _BY_VARIABLES[system](reading)
    if has_errors(reading.found):
        return None, reading.found
    hosts, mistakes = join_lines(reading.lines)
    found = [*reading.found, *mistakes]
    if has_errors(found):
        return None, found
    found += _crowded(hosts, reading)
    return Allocation(system, tuple(hosts), reading.devices, tuple(dict.fromkeys(reading.read))), found


def _crowded(hosts: list[Host], reading: _Reading) -> list[Diagnostic]:
    """Warn if the host of the job's script has more slots than devices, as Slurm without `--ntasks` gives one slot to each core."""
    first, devices = hosts[0], len(reading.devices)
    if not devices or first.slots <= devices:
        return []
    message = (
        f"host `{first.name}` gets {counted(first.slots, 'slot')}, and the job has {counted(devices, 'device')} there"
    )
    hints = (f"for one rank a device: `--slots {devices}`",)
    label = Label(first.slots_span, "slots of the host")
    return [Diagnostic(NO_ALLOCATION, message, label, hints=hints, severity=Severity.WARNING)]


def _items(source: Source) -> Iterator[tuple[str, Span]]:
    """Split a list at its commas, but not at those in brackets; an item may be empty."""
    for number, text in enumerate(source.lines, start=1):
        start, in_brackets = 0, False
        for mark in _MARK.finditer(f"{text},"):
            if mark.group() != ",":
                in_brackets = mark.group() == "["
            elif not in_brackets or mark.start() == len(text):
                item = text[start : mark.start()]
                column = start + len(item) - len(item.lstrip()) + 1
                yield item.strip(), Span(source, number, column, max(1, len(item.strip())))
                start = mark.end()


def _words(source: Source) -> Iterator[tuple[str, Span]]:
    for number, text in enumerate(source.lines, start=1):
        for match in _WORD.finditer(text):
            yield match.group(), Span(source, number, match.start() + 1, len(match.group()))


def _read_slurm(reading: _Reading) -> None:
    """Read Slurm's list of nodes and its tasks per node, for each component of a heterogeneous job."""
    for suffix in _components(reading):
        nodes = reading.required(f"SLURM_JOB_NODELIST{suffix}")
        if nodes is None:
            return
        lines = reading.names(nodes, _items(nodes))
        if has_errors(reading.found):
            return
        reading.check_number(f"SLURM_JOB_NUM_NODES{suffix}", len(lines), nodes)
        _add_tasks(reading, lines, nodes=nodes, name=f"SLURM_TASKS_PER_NODE{suffix}")
    reading.devices = _slurm_devices(reading)


def _slurm_devices(reading: _Reading) -> tuple[int, ...]:
    """Return the devices that the job has on the host of its script."""
    source = reading.variable("SLURM_JOB_GPUS")
    numbers = expand_ranges(f"[{source.text.strip()}]") if source else []
    is_known = not isinstance(numbers, str)
    devices = tuple(map(int, numbers)) if is_known else ()
    if source and (not is_known or len({*devices}) < len(devices)):
        label = "a device is listed twice" if is_known else "expected numbers such as `0,1` or `0-3`"
        message = f"`SLURM_JOB_GPUS` is `{shown(source.text)}`"
        reading.found.append(mistake_at(codes.WRONG_VALUE, message, source.start(), label=label))
    return devices


def _components(reading: _Reading) -> list[str]:
    """Return what the names of variables end with: nothing, or the number of each component of a heterogeneous job."""
    size = reading.variable("SLURM_HET_SIZE")
    text = size.text.strip() if size else "1"
    if size is not None and not (text.isascii() and text.isdigit() and 0 < int(text[:5]) <= _MOST_COMPONENTS):
        message = f"`SLURM_HET_SIZE` is `{shown(text)}`"
        label = f"expected a whole number from 1 to {_MOST_COMPONENTS}"
        reading.found.append(mistake_at(codes.WRONG_VALUE, message, size.start(), label=label))
        return []
    return [""] if text == "1" else [f"_HET_GROUP_{number}" for number in range(int(text))]


def _add_tasks(reading: _Reading, lines: list[HostLine], *, nodes: Source, name: str) -> None:
    """Give the hosts their slots by a list such as `2(x2),1`, which counts hosts in the order of the list of nodes."""
    if reading.given_slots is not None:
        reading.add(lines, reading.given_slots)
        return
    tasks = reading.required(name)
    if tasks is None:
        return
    runs: list[tuple[int, int, Span]] = []
    for word, span in _items(tasks):
        match = _TASKS.match(word)
        if match is None:
            message, label = (
                f"`{name}` has `{shown(word or ',')}`",
                "expected `2` or `2(x3)`: tasks, and on how many nodes",
            )
            reading.found.append(mistake_at(codes.WRONG_VALUE, message, span, label=label))
            continue
        slots, mistake = parse_count(name, match["count"], replace(span, length=len(match["count"])))
        reading.found += [mistake] if mistake else []
        runs.append((slots, int(match["repeat"] or 1), span))
    if has_errors(reading.found):
        return
    # The sum is compared before anything is repeated, so that no text of a few characters makes a list of millions.
    total = sum(repeat for _, repeat, _ in runs)
    if total != len(lines):
        message = f"`{name}` counts tasks of {counted(total, 'host')}, and `{nodes.name[1:]}` names {len(lines)}"
        reading.contradicts(message, tasks.start(), (nodes.start(), counted(len(lines), "host")))
        return
    rest = iter(lines)
    for slots, repeat, span in runs:
        reading.add([next(rest) for _ in range(repeat)], slots, span)


def _read_skypilot(reading: _Reading) -> None:
    _read_addresses(reading, "SKYPILOT_NODE_IPS", devices="SKYPILOT_NUM_GPUS_PER_NODE", number="SKYPILOT_NUM_NODES")


def _read_dstack(reading: _Reading) -> None:
    _read_addresses(reading, "DSTACK_NODES_IPS", devices="DSTACK_GPUS_PER_NODE", number="DSTACK_NODES_NUM")


def _read_addresses(reading: _Reading, name: str, *, devices: str, number: str) -> None:
    """Read one address a line, and give each host one slot per device, or one slot if the task has no devices."""
    addresses = reading.required(name)
    if addresses is None:
        return
    lines = reading.names(addresses, _words(addresses))
    reading.check_number(number, len(lines), addresses)
    count, slots = reading.variable(devices), 1
    if count is not None and count.text.strip("0 \n"):
        slots, mistake = parse_count(devices, count.text.strip(), count.start())
        reading.found += [mistake] if mistake else []
    reading.add(lines, slots, count.start() if count else None)


def _read_k8s(reading: _Reading, file: Source) -> None:
    """Read a launcher pod's hostfile, which has `HOST slots=N` for Open MPI and `HOST:N` for Intel MPI and MPICH."""
    words = list(_words(file))
    if not words or not all(_NAME_AND_COUNT.match(word) for word, _ in words):
        hosts, found = parse_hosts(file)
        reading.found += found
        for host in hosts:
            reading.add([HostLine(host.name, host.user, host.span)], host.slots, host.slots_span)
        return
    for word, span in words:
        name, _, count = word.partition(":")
        lines, found = parse_names(name, replace(span, length=len(name)))
        slots, mistake = parse_count("slots", count, span)
        reading.found += [*found, *([mistake] if mistake else [])]
        reading.add(lines, slots, span)


def _read_ray(reading: _Reading, file: Source) -> None:
    """Read the nodes that are alive from JSON or YAML, the head first; a node has one slot per device, or one without any."""
    from ttlaunch.spec.located.nodes import items_of, plain, span_of  # noqa: PLC0415 - only these nodes need PyYAML
    from ttlaunch.spec.located.yaml import parse_yaml  # noqa: PLC0415

    root, found = parse_yaml(file, codes=TOPOLOGY)
    reading.found += found
    nodes = items_of(root)
    if root is not None and not nodes:
        message, label = f"{file.name} is no list of nodes", "expected what `ray list nodes --format json` prints"
        reading.found.append(mistake_at(codes.WRONG_VALUE, message, root.span, label=label))
    alive = []
    for node in nodes:
        values = plain(node)
        if not isinstance(values, dict) or not all(isinstance(values.get(key), str) for key in ("node_ip", "state")):
            message = f"a node in {file.name} lacks `node_ip` or `state`"
            reading.found.append(mistake_at(codes.MISSING_KEY, message, node.span, label="expected keys of a Ray node"))
        elif values["state"] == "ALIVE":
            alive.append((values.get("is_head_node") is not True, node, values["node_ip"]))
    for _, node, address in sorted(alive, key=lambda one: one[0]):
        lines, mistakes = parse_names(address, span_of(node, ("node_ip",)))
        reading.found += mistakes
        _add_ray_node(reading, lines, node)
    if nodes and not alive and not has_errors(reading.found):
        reading.contradicts(f"no node in {file.name} is alive", file.start())


def _add_ray_node(reading: _Reading, lines: list[HostLine], node: "Node") -> None:
    from ttlaunch.spec.located.nodes import ScalarNode, node_at  # noqa: PLC0415 - as above

    devices = node_at(node, ("resources_total", "GPU"))
    if not isinstance(devices, ScalarNode) or devices.value in (None, 0):
        reading.add(lines, 1)
        return
    # Ray writes whole numbers as 4.0.
    slots, mistake = parse_count("GPU", devices.written.removesuffix(".0"), devices.span)
    reading.found += [mistake] if mistake else []
    reading.add(lines, slots, devices.span)


_BY_VARIABLES: dict[str, Callable[[_Reading], None]] = {
    "slurm": _read_slurm,
    "skypilot": _read_skypilot,
    "dstack": _read_dstack,
}
