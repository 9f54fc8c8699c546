"""Rules between the configuration and the devices of the topology: mesh shapes, parallelism inside a rank."""

from collections.abc import Iterator

from ttlaunch.diagnostics import Diagnostic, Label, Severity
from ttlaunch.diagnostics.count import counted
from ttlaunch.spec.recipe.config import LoadedConfig
from ttlaunch.spec.recipe.declare import Layout, Per, Recipe
from ttlaunch.spec.topology.model import Topology

_LOCAL_RANKS = "device_config.local_ranks"


def check_devices(loaded: LoadedConfig, topology: Topology, layout: Layout, *, recipe: Recipe) -> list[Diagnostic]:
    """Apply the rules between the devices of the configuration and those of the topology."""
    device = loaded.checked.device_config
    if (device.enable_ddp or device.enable_tp) and _gives_workers_several_ranks(layout):
        return [*_one_local_rank(loaded)]
    splits = any(_gives_workers_several_ranks(other) for other in recipe.layouts)
    return [*_tensor_parallel(loaded, splits=splits), *_mesh_shape(loaded, topology), *_ddp(loaded)]


def _gives_workers_several_ranks(layout: Layout) -> bool:
    """Return whether this layout gives each device of a worker a rank if `enable_ddp` or `enable_tp` is true."""
    return any(isinstance(count, Per) and _LOCAL_RANKS in {count.key, *count.times} for count in layout.roles.values())


def _without_effect(loaded: LoadedConfig, key: str, why: str, *, label: str, hint: str = "") -> Diagnostic:
    value = getattr(loaded.checked.device_config, key)
    message = f"`{key}` is {'true' if value is True else value} but has no effect: {why}"
    place, hints = loaded.label(f"device_config.{key}", label), (hint,) if hint else ()
    return Diagnostic("C020", message, place, hints=hints, severity=Severity.WARNING)


def _one_local_rank(loaded: LoadedConfig) -> Iterator[Diagnostic]:
    device = loaded.checked.device_config
    key = "enable_ddp" if device.enable_ddp else "enable_tp"
    if device.local_ranks == 1:
        why = f"`mesh_shape` is {device.mesh_shape or 'null'}, one device a worker"
        label = "gives each device of a worker a rank, and there is one"
        hint = "`--set 'device_config.mesh_shape=[1, 2]'` gives each worker two ranks"
        yield _without_effect(loaded, key, why, label=label, hint=hint)


def _tensor_parallel(loaded: LoadedConfig, *, splits: bool) -> Iterator[Diagnostic]:
    """Report `enable_tp` without effect; `splits` says whether another layout of the recipe splits the model."""
    if loaded.checked.device_config.enable_tp and splits:
        label = "splits the model over the ranks of a worker, of which there are none"
        yield _without_effect(loaded, "enable_tp", "one process has the whole model", label=label)
    elif loaded.checked.device_config.enable_tp:
        message = "`enable_tp` is true but this recipe does not split matrices over devices"
        place = loaded.label("device_config.enable_tp", "nothing would be split")
        yield Diagnostic("C019", message, place, hints=("`--set device_config.enable_tp=false`",))


def _mesh_shape(loaded: LoadedConfig, topology: Topology) -> Iterator[Diagnostic]:
    shape = loaded.checked.device_config.mesh_shape
    if shape is None:
        return
    if not topology.bindings:
        why = f"configuration `{topology.name}` has no meshes"
        yield _without_effect(loaded, "mesh_shape", why, label="each rank computes on one device")
        return
    needed = shape[0] * shape[1]
    for binding in topology.bindings:
        mesh = topology.driven(binding)
        if needed != mesh.devices_per_host:
            rows, columns = mesh.device_shape
            message = (
                f"`mesh_shape` {shape} needs {needed} devices but rank {binding.rank} drives {mesh.devices_per_host}"
            )
            place = loaded.label("device_config.mesh_shape", f"{shape[0]} × {shape[1]} = {needed} devices")
            on_hosts = f"{mesh}: {rows} × {columns} devices on {counted(mesh.hosts, 'host')}"
            yield Diagnostic("P008", message, place, (Label(mesh.span, on_hosts),))
            return


def _ddp(loaded: LoadedConfig) -> Iterator[Diagnostic]:
    if loaded.checked.device_config.enable_ddp:
        label = "averages over the devices of a rank, of which there is one"
        yield _without_effect(loaded, "enable_ddp", "a rank computes on one device", label=label)
