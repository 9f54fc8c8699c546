"""What `--on slurm[:PARTITION]` and its options ask of Slurm: hosts for a number of ranks.

The options of salloc and sbatch are derived from one `SlurmRequest`, and so are the hosts of a plan that is made before Slurm has
chosen any: `slurm-1`, `slurm-2`, …, with the slots that the real ones will have.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ttlaunch.diagnostics import Diagnostic, Source, counted, shown, usage_mistake
from ttlaunch.diagnostics.diagnostic import mistake_at
from ttlaunch.spec.topology.host_names import expand_ranges
from ttlaunch.spec.topology.model import Binding, Host, Topology

PREFIX = "slurm"
JOB_VARIABLE = "SLURM_JOB_ID"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+-]*\Z")
_TIME = re.compile(r"(?:[0-9]{1,7}(?::[0-5]?[0-9]){0,2}|[0-9]{1,4}-[0-9]{1,2}(?::[0-5]?[0-9]){0,2})\Z", re.ASCII)
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.*+-]*"
_GRES = re.compile(rf"{_PART}(?::{_PART})*(?:,{_PART}(?::{_PART})*)*\Z")
_GPUS = re.compile(r"gpu(?::[^,:]+)??(?::([0-9]{1,4}))?\Z")
_MOST_HOSTS = 65_536
_PART_OF_JOB = re.compile(r"(?<!\S)Nodes=(\S{1,65536}) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_IN_LIST = re.compile(r"(?:[^,\[]|\[[^\[\]]*(?:\]|\Z))+")
_GPUS_OF_JOB = re.compile(r"(?:\A|,)gpu(?::[^,:()]+)?:[0-9]+\(IDX:([0-9][0-9,-]*)\)")
_VISIBLE = ("TT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
OTHER_DEVICES = "P072"
_OF_OPTIONS = {
    "partition": ("a partition of `--on slurm:PARTITION`", _NAME, "a name such as `gpu`"),
    "time_limit": ("`--time`", _TIME, "minutes, `hours:minutes:seconds` or `days-hours`"),
    "gres": ("`--gres`", _GRES, "`gpu:2` or `gpu:a100:2`"),
    "account": ("`--account`", _NAME, "a name"),
    "qos": ("`--qos`", _NAME, "a name"),
}


@dataclass(frozen=True)
class SlurmRequest:
    """Hosts that Slurm is asked for.

    Attributes:
        partition: Where; None for Slurm's default partition.
        nodes: The number of hosts.
        ranks: The number of ranks on all of them; None for `per_host` on each.
        per_host: The number of ranks on each host; None to derive it from `ranks`, or from the devices of a host.
        time_limit: How long, as Slurm writes it; None for the partition's default.
        gres: Devices of each host, such as `gpu:2`.
        account: Who pays; None for the user's default.
        qos: The quality of service; None for the default.
    """

    partition: str | None = None
    nodes: int = 1
    ranks: int | None = None
    per_host: int | None = None
    time_limit: str | None = None
    gres: str | None = None
    account: str | None = None
    qos: str | None = None

    @property
    def devices(self) -> int:
        """Return the number of GPUs of each host; 0 if none are asked for."""
        found = [_GPUS.match(part) for part in (self.gres or "").split(",")]
        return sum(int(match[1] or 1) for match in found if match)

    @property
    def slots(self) -> tuple[int, ...]:
        """Return the number of ranks on each host: as even as possible, and one for each device if nothing else says it."""
        if self.ranks is None:
            return (self.per_host or self.devices or 1,) * self.nodes
        each, more = divmod(self.ranks, self.nodes)
        return tuple(each + (number < more) for number in range(self.nodes))

    def options(self) -> list[str]:
        """Return the request as options of salloc and sbatch."""
        given = {
            "partition": self.partition,
            "nodes": str(self.nodes),
            "ntasks": str(sum(self.slots)),
            "ntasks-per-node": str(max(self.slots)),
            "time": self.time_limit,
            "gres": self.gres,
            "account": self.account,
            "qos": self.qos,
        }
        return [f"--{name}={value}" for name, value in given.items() if value is not None]

    def as_hosts(self) -> Source:
        """Return hosts as Slurm will give them, as the text of a hostfile."""
        return Source("what Slurm is asked for", "".join(f"slurm-{n} slots={s}\n" for n, s in enumerate(self.slots, 1)))


def is_slurm(on: str) -> bool:
    """Whether a value of `--on` asks Slurm for hosts."""
    return on == PREFIX or on.startswith(f"{PREFIX}:")


def partition_of(on: str) -> str | None:
    """Return the partition that `--on slurm:PARTITION` names; None for `slurm` alone."""
    return on.partition(":")[2] or None


def parse_slurm_request(
    on: str, values: Mapping[str, str | None], *, nodes: int | None, ranks: int | None, per_host: int | None
) -> tuple[SlurmRequest, list[Diagnostic]]:
    """Check the options that go with `--on slurm[:PARTITION]`.

    Args:
        on: The value of `--on`.
        values: `time_limit`, `gres`, `account` and `qos`, as typed.
        nodes: The number of hosts; None for one.
        ranks: The number of ranks; None if nothing says it.
        per_host: The number of ranks on each host; None if nothing says it.
    """
    typed = {**values, "partition": on.removeprefix(PREFIX)[1:] if ":" in on else None}
    found = []
    for name, value in typed.items():
        option, pattern, expected = _OF_OPTIONS[name]
        if value is not None and not pattern.match(value):
            found.append(usage_mistake(f"{option} is `{shown(value)}`; {expected} was expected"))
    nodes = nodes or 1
    if nodes > _MOST_HOSTS:
        found.append(usage_mistake(f"`--nodes` is {nodes}; at most {_MOST_HOSTS} were expected"))
    elif ranks is not None and per_host is not None and ranks != nodes * per_host:
        found.append(
            usage_mistake(f"`--ranks {ranks}` was given but {per_host} on each of {nodes} hosts is {nodes * per_host}")
        )
    elif ranks is not None and ranks < nodes:
        verb = "was" if ranks == 1 else "were"
        message = f"{counted(ranks, 'rank')} {verb} asked for on {nodes} hosts, and every host needs one"
        found.append(usage_mistake(message, f"`--nodes {ranks}`"))
    request = SlurmRequest(ranks=ranks, per_host=per_host, nodes=min(nodes, _MOST_HOSTS), **typed)
    return request, found


def devices_of_job(shown_job: str) -> dict[str, tuple[int, ...]]:
    """Return the numbers of the GPUs that a job has on each of its hosts, as far as Slurm says them.

    Args:
        shown_job: What `scontrol --oneliner --details show job` has printed.
    """
    found: dict[str, tuple[int, ...]] = {}
    for nodes, devices in _PART_OF_JOB.findall(shown_job):
        texts = _GPUS_OF_JOB.findall(devices)
        numbers = expand_ranges(f"[{','.join(texts)}]") if texts else []
        for item in _IN_LIST.findall(nodes):
            names = expand_ranges(item)
            if isinstance(names, str) or isinstance(numbers, str) or not numbers or len(found) > _MOST_HOSTS:
                continue
            for name in names:
                found[name] = (*found.get(name, ()), *map(int, numbers))
    return found


def names_devices(topology: Topology, host: Host) -> bool:
    """Whether bindings name devices for ranks of a host."""
    pairs = zip(topology.bindings, topology.slots, strict=False)
    own = [binding for binding, slot in pairs if slot.host == host]
    return any(_named_devices({**topology.global_environment, **binding.environment}) for binding in own)


def check_devices(
    topology: Topology, *, each: int = 0, given: Mapping[str, Collection[int]] | None = None
) -> list[Diagnostic]:
    """Compare the devices that bindings name for ranks with those that Slurm gives, and report the first contradiction.

    Args:
        topology: The cluster, on the hosts of Slurm.
        each: The number of devices that each host is asked for; 0 if none are.
        given: By the name of a host, the numbers of the devices that a job has there; without a host where they are not known.
    """
    named: dict[Host, dict[int, Binding]] = {}  # the first rank that names each device
    for binding, slot in zip(topology.bindings, topology.slots, strict=False):
        ranks = named.setdefault(slot.host, {})
        for device in _named_devices({**topology.global_environment, **binding.environment}):
            ranks.setdefault(device, binding)
    for host, ranks in named.items():
        if each and len(ranks) > each:
            device, binding = list(ranks.items())[each]
            message = (
                f"the ranks of a host name {counted(len(ranks), 'device')}, and Slurm is asked for {each} of each host"
            )
            label = f"rank {binding.rank} names device {device}"
            hint = f"ask for {len(ranks)} devices with `--gres`, or name fewer in `env_overrides`"
            return [mistake_at(OTHER_DEVICES, message, binding.span, label=label, hint=hint)]
        # Where Slurm hides the other devices from a job, those of the job are counted from 0.
        own = (given or {}).get(host.name, ())
        numbers = {*own, *range(len(own))}
        strange = next((device for device in ranks if device not in numbers), None) if numbers else None
        if strange is not None:
            message = f"rank {ranks[strange].rank} names device {strange}, which the Slurm job does not have on `{shown(host.name)}`"
            label = f"the job has {', '.join(map(str, own))}"
            hint = "leave the variable out, and the rank sees all devices of the job, or name those of the job"
            return [mistake_at(OTHER_DEVICES, message, ranks[strange].span, label=label, hint=hint)]
    return []


def _named_devices(environment: Mapping[str, str]) -> list[int]:
    """Return the numbers of the devices that a rank's variables name; none for a text that holds no numbers."""
    text = next((environment[name] for name in _VISIBLE if name in environment), "")
    words = [word.strip() for word in text.split(",")]
    return [int(word) for word in words if re.fullmatch(r"[0-9]{1,4}", word, re.ASCII)]
