"""Whether ranks that are to compute on CUDA devices can find any, as far as that is known without importing torch.

Where there is a device file and a torch that was built for it, only the rank can find out; it reports it at start (R002).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ttlaunch.diagnostics import Diagnostic, Label
from ttlaunch.diagnostics.count import counted
from ttlaunch.hosts.doctor.facts import HostFacts
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.model import Topology

if TYPE_CHECKING:
    from ttlaunch.spec.recipe.config import LoadedConfig
    from ttlaunch.spec.recipe.declare import NeedsProcesses

_KEY = "device_config.device"
_DEVICE_FILE = re.compile(r"/dev/nvidia[0-9]+")
_INSTEAD = f"`--set {_KEY}=auto` computes on the CPU where there is no GPU"


@dataclass(frozen=True)
class Gpus:
    """The facts that decide whether torch can find a CUDA device.

    Attributes:
        files: Device files of GPUs.
        torch: The version of torch on the host; None if it is not known.
    """

    files: tuple[str, ...]
    torch: str | None


def gpus_of_hosts(facts: Mapping[str, HostFacts]) -> dict[str, Gpus]:
    """Return the facts about GPUs, for each host that reported its devices."""
    known = {host: (one.devices, one.python) for host, one in facts.items()}
    return {
        host: Gpus(devices.gpu_files, python.packages.get("torch") if python else None)
        for host, (devices, python) in known.items()
        if devices is not None
    }


def check_cuda(loaded: "LoadedConfig", hosts: Mapping[str, Gpus], *, topology: Topology) -> list[Diagnostic]:
    """An error if `device` is `cuda` and a host surely has no CUDA device.

    Args:
        loaded: The configuration.
        hosts: The hosts by their name in the hostfile.
        topology: Where the hosts stand in it.
    """
    if loaded.checked.device_config.device != "cuda":
        return []
    reasons = {host: reason for host, gpus in hosts.items() if (reason := _why_not(gpus))}
    if not reasons:
        return []
    first, reason = next(iter(reasons.items()))
    more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    spans = {str(host.name): host.span for host in topology.hosts}
    span = loaded.span(_KEY)
    label = Label(span, "needs one on every host") if span else None
    others = tuple(Label(spans[host], text) for host, text in reasons.items() if host in spans)
    message = f"`device` is `cuda`, and torch can find no CUDA device on {first}{more}: {reason}"
    return [Diagnostic("P044", message, label, others, hints=(_INSTEAD,))]


def check_one_each(
    loaded: "LoadedConfig", hosts: Mapping[str, Gpus], *, ranks_on: Iterable[str], needs: "Sequence[NeedsProcesses]"
) -> list[Diagnostic]:
    """An error if ranks are to share a CUDA device in a group of torch's: NCCL needs one for each.

    Args:
        loaded: The configuration.
        hosts: The hosts by their name in the hostfile.
        ranks_on: The host of each rank.
        needs: What of the recipe needs a process for each rank, because it is torch's.
    """
    if loaded.checked.device_config.device != "cuda":
        return []
    from ttlaunch.spec.recipe.config import value_of  # noqa: PLC0415 - only runs on GPUs need it

    need = next((one for one in needs if value_of(loaded, one.key) == one.value), None)
    if need is None:
        return []
    for host, ranks in Counter(ranks_on).items():
        devices = sum(bool(_DEVICE_FILE.fullmatch(file)) for file in (hosts[host].files if host in hosts else ()))
        if 0 < devices < ranks:
            message = (
                f"{counted(ranks, 'rank')} of {host} would share {counted(devices, 'CUDA device')}: `{need.key}` "
                "uses NCCL, which needs one for each rank"
            )
            key = need.key if loaded.span(need.key) else _KEY
            hints = (
                f"`-n {devices}` starts a rank for each device",
                "other recipes share a device: `data_parallel`, `zero`",
            )
            return [Diagnostic("P076", message, loaded.label(key, need.because), hints=hints)]
    return []


def _why_not(gpus: Gpus) -> str | None:
    if gpus.torch is not None and gpus.torch.endswith("+cpu"):
        return f"torch {gpus.torch} was built without CUDA"
    return None if gpus.files else "there is no GPU in /dev"
