"""The hosts of `--on slurm[:PARTITION]`: those of the job that this process is in, or those that Slurm is asked for."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Diagnostic, Source, has_errors, shown, usage_mistake
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.allocation import read_allocation
from ttlaunch.spec.topology.model import Topology
from ttlaunch.spec.topology.slurm_request import (
    JOB_VARIABLE,
    PREFIX,
    SlurmRequest,
    check_devices,
    devices_of_job,
    is_slurm,
    names_devices,
    parse_slurm_request,
    partition_of,
)

_MOST_DIGITS = 5
_OPTIONS = {"nodes": "--nodes", "time_limit": "--time", "gres": "--gres", "account": "--account", "qos": "--qos"}


@dataclass(frozen=True)
class SlurmHosts:
    """The hosts of a run by Slurm, as the text of a hostfile.

    Attributes:
        job: The job that has the hosts; None as long as no job has been asked for.
        request: What Slurm is asked for; None if the hosts are there.
        devices: The numbers of the devices that the job has on its first host; empty if they are not known.
        remark: What the plan says about the hosts.
    """

    hosts: Source
    job: str | None
    request: SlurmRequest | None
    remark: str
    devices: tuple[int, ...] = ()

    def check_devices(self, topology: Topology) -> list[Diagnostic]:
        """Compare the devices that bindings name with those that Slurm gives.

        A job's variables have the devices of its first host. Slurm is asked for those of the others, where bindings name some; what
        it does not say in time is not checked.
        """
        given: dict[str, Sequence[int]] = {}
        if self.job is not None and any(names_devices(topology, host) for host in topology.hosts[1:]):
            given.update(_ask_for_devices(self.job))
        if self.devices:
            given[topology.hosts[0].name] = self.devices
        return check_devices(topology, each=self.request.devices if self.request else 0, given=given)


def _ask_for_devices(job: str) -> dict[str, tuple[int, ...]]:
    from ttlaunch.hosts.transport.slurm import ask_slurm

    try:
        answer = ask_slurm("scontrol", "--oneliner", "--details", "show", "job", job)
    except OSError:
        return {}
    return devices_of_job(answer.stdout) if answer.returncode == 0 else {}


def slurm_hosts(spec: RunSpec, *, ranks: int | None = None) -> tuple[SlurmHosts | None, list[Diagnostic]]:
    """Find or ask for the hosts that a specification wants from Slurm.

    Args:
        spec: The specification.
        ranks: How many ranks the target needs, if the specification does not say it.

    Returns:
        None if the specification wants no hosts from Slurm, or if there are mistakes.
    """
    given = [option for name, option in _OPTIONS.items() if getattr(spec, name) is not None]
    if not is_slurm(spec.on):
        if not given:
            return None, []
        message = f"`{given[0]}` asks Slurm for hosts, and `--on {shown(spec.on)}` names others"
        return None, [usage_mistake(message, f"`--on {PREFIX}:PARTITION`")]
    variables = job_variables(spec)
    if variables is None:
        return _asked_for(spec, ranks)
    job = variables[JOB_VARIABLE]
    if spec.allocation is None and (mistake := _refuse_request(spec, variables, given)):
        return None, [mistake]
    allocation, found = read_allocation("slurm", environment=variables, file=None, slots=_per_host(spec))
    if allocation is None:
        return None, found
    hosts = Source(f"Slurm job {job}", allocation.as_hostfile())
    return SlurmHosts(hosts, job, None, f"on the hosts of Slurm job {job}", allocation.devices), found


def job_variables(spec: RunSpec) -> Mapping[str, str] | None:
    """Return the variables of the job that gives the hosts; None if no job has been asked for."""
    variables = os.environ if spec.allocation is None else spec.allocation
    return variables if variables.get(JOB_VARIABLE, "").isdecimal() else None


def _asked_for(spec: RunSpec, ranks: int | None) -> tuple[SlurmHosts | None, list[Diagnostic]]:
    values = {name: getattr(spec, name) for name in ("time_limit", "gres", "account", "qos")}
    nodes = spec.nodes if spec.nodes is not None or spec.nnodes is None else _number(spec.nnodes)
    wanted = spec.ranks if spec.ranks is not None else ranks
    per_host = _per_host(spec)
    request, found = parse_slurm_request(
        spec.on, values, nodes=nodes, ranks=None if per_host and spec.ranks is None else wanted, per_host=per_host
    )
    if has_errors(found):
        return None, found
    remark = f"Slurm chooses the hosts: {' '.join(request.options())}"
    return SlurmHosts(request.as_hosts(), None, request, remark), found


def _refuse_request(spec: RunSpec, variables: Mapping[str, str], given: list[str]) -> Diagnostic | None:
    """Say what is wrong if options ask for hosts although this process is in a job, which has its hosts."""
    job = variables[JOB_VARIABLE]
    hint = f"leave it out to use the hosts of the job, or `env -u {JOB_VARIABLE} ttlaunch …` to ask for others"
    if given:
        return usage_mistake(
            f"`{given[0]}` asks for hosts, and this shell is in Slurm job {job}, which has its own", hint
        )
    partition, own = partition_of(spec.on), variables.get("SLURM_JOB_PARTITION")
    if partition is not None and own is not None and partition != own:
        message = f"`--on {shown(spec.on)}` was given, and this shell is in Slurm job {job} in partition `{shown(own)}`"
        return usage_mistake(message, f"`--on {PREFIX}` uses the hosts of the job")
    return None


def _per_host(spec: RunSpec) -> int | None:
    return _number(spec.nproc_per_node)


def _number(text: str | None) -> int | None:
    """Return a positive number; None for any other text, which `ranks_of` refuses."""
    return (
        int(text) or None
        if text is not None and text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
        else None
    )


def with_variables_of_job(spec: RunSpec, variables: Mapping[str, str]) -> RunSpec:
    """Return the specification with the hosts of a job that Slurm has given for it."""
    return replace(spec, allocation={name: value for name, value in variables.items() if name.startswith("SLURM_")})
