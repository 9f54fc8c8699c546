"""Translate torchrun's options, `--nproc-per-node`, `--nnodes` and `--standalone`, into a number of ranks on the hosts of a cluster.

torchrun is started once on every host and says there how many processes the host gets. Here a hostfile says it, so these options can
only repeat what the hosts say, or leave slots of a single host free.
"""

from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Blame, Diagnostic, Label, counted, shown, usage_mistake
from ttlaunch.hosts.transport.local import is_this_machine
from ttlaunch.spec.topology.model import Topology

_MOST = 7
"""The most digits of a number; a larger one is no number of ranks."""

_MEETING = "leave `{0}` out: ttlaunch starts all hosts, and chooses the address and the port"
_LOGS = "leave `{0}` out: each rank has its log in the run's folder, and `--only rank=0` chooses what is shown"
_NONE = "leave `{0}` out: ttlaunch needs nothing in its place"
_INSTEAD = {
    "--max-restarts": "`--max-restarts N`, with a dash, as all options here",
    **dict.fromkeys(("-r", "-t"), _LOGS),
    **dict.fromkeys(("--node-rank", "--master-addr", "--master-port", "--local-addr"), _MEETING),
    **dict.fromkeys(("--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--rdzv-conf"), _MEETING),
    **dict.fromkeys(("--log-dir", "--redirects", "--tee", "--local-ranks-filter", "--logs-specs"), _LOGS),
    **dict.fromkeys(("--role", "--monitor-interval", "--start-method", "--event-log-handler"), _NONE),
    **dict.fromkeys(("-m", "--module"), "a module goes behind `--`: `-- python -m MODULE`"),
    "--no-python": "a program goes behind `--`: `-- PROGRAM`",
}
"""What to do instead of each of torchrun's options that ttlaunch does not have."""


def instead_of(option: str) -> str | None:
    """Return what a user of torchrun does here instead of one of its options; None for other options."""
    hint = _INSTEAD.get(option.replace("_", "-"))
    return hint.format(option) if hint else None


def ranks_of(request: RunSpec, topology: Topology) -> int | Diagnostic | None:
    """Return the number of ranks for which the options of a run ask; None if they leave it open."""
    if request.nproc_per_node is None and request.nnodes is None and not request.standalone:
        return request.ranks
    hosts, per_host = len(topology.hosts), _number(request.nproc_per_node or "1")
    nodes = _number((request.nnodes or str(hosts)).removesuffix(f":{(request.nnodes or '').partition(':')[0]}"))
    if per_host is None:
        message = f"`--nproc-per-node` is `{shown(request.nproc_per_node)}`; a number of ranks was expected"
        return usage_mistake(message, "`--nproc-per-node 2` starts two ranks on every host")
    if nodes is None:
        message = f"`--nnodes` is `{shown(request.nnodes)}`; a number of hosts was expected"
        return usage_mistake(message, "the number of hosts does not change during a run: `--nnodes 2`")
    return _contradiction(request, topology, per_host=per_host, nodes=nodes) or per_host * nodes


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST and int(text) else None


def _contradiction(request: RunSpec, topology: Topology, *, per_host: int, nodes: int) -> Diagnostic | None:
    """Return what is wrong if the options contradict the hosts or each other."""
    hosts, asked = topology.hosts, f"`--nproc-per-node {per_host}`"
    elsewhere = [host for host in hosts if not is_this_machine(host.name)]
    if request.standalone and (elsewhere or len(hosts) > 1):
        host = elsewhere[0] if elsewhere else hosts[-1]
        message = f"`--standalone` was given but `{topology.name}` has other hosts than this machine"
        return _against(message, Label(host.span, "not this machine"), "leave out `--standalone`, or name no cluster")
    if nodes != len(hosts):
        have = counted(len(hosts), "host")
        message = f"`--nnodes {nodes}` was given but `{topology.name}` has {have}"
        hint = "leave out `--nnodes`: every host of the hostfile gets ranks; `--on NAME` chooses another cluster"
        return _against(message, Label(hosts[-1].span, f"the last of {have}"), hint)
    if request.ranks is not None and request.ranks != nodes * per_host:
        message = f"`--ranks {request.ranks}` was given but {asked} on {counted(nodes, 'host')} is {nodes * per_host}"
        return _against(message, None, "give only one of the two")
    # Ranks fill one host after the other, so with several hosts each must have exactly as many slots.
    wrong = [host for host in hosts if host.slots < per_host or (len(hosts) > 1 and host.slots != per_host)]
    if wrong:
        offered = counted(wrong[0].slots, "slot")
        message = f"{asked} was given but {wrong[0].name} has {offered}"
        hint = f"write `slots={per_host}` in the hostfile, or leave out `--nproc-per-node`"
        return _against(message, Label(wrong[0].slots_span, offered), hint)
    return None


def _against(message: str, place: Label | None, hint: str) -> Diagnostic:
    return Diagnostic("P055", message, place, hints=(hint,), blame=Blame.COMMAND_LINE)
