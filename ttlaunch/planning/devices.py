"""Rules between the configuration and the devices of the topology: mesh shapes, parallelism inside a rank."""

from collections.abc import Iterator

from ttlaunch.diagnostics import Diagnostic, Label, Severity
from ttlaunch.diagnostics.count import counted
from ttlaunch.spec.recipe.config import LoadedConfig
from ttlaunch.spec.recipe.declare import Layout, Per, Recipe
from ttlaunch.spec.topology.model import Topology

_LOCAL_RANKS = "device_config.local_ranks"


def check_devices(loaded: LoadedConfig, topology: Topology, layout: Layout, *, recipe: Recipe) -> list[Diagnostic]:
    """Every rule of this file that the configuration breaks on this topology."""
    device = loaded.checked.device_config
    if (device.enable_ddp or device.enable_tp) and _gives_workers_several_ranks(layout):
        return [*_one_local_rank(loaded)]
    splits = any(_gives_workers_several_ranks(other) for other in recipe.layouts)
    return [*_tensor_parallel(loaded, splits=splits), *_mesh_shape(loaded, topology), *_ddp(loaded)]


def _gives_workers_several_ranks(layout: Layout) -> bool:
    """Whether `enable_ddp` and `enable_tp` make ranks of a worker's devices."""
    return any(isinstance(count, Per) and _LOCAL_RANKS in {count.key, *count.times} for count in layout.roles.values())


def _one_local_rank(loaded: LoadedConfig) -> Iterator[Diagnostic]:
    device = loaded.checked.device_config
    key = "enable_ddp" if device.enable_ddp else "enable_tp"
    if device.local_ranks == 1:
        yield Diagnostic(
            "C020",
            f"`{key}` is true but has no effect: `mesh_shape` is {device.mesh_shape or 'null'}, one device a worker",
            _label(loaded, f"device_config.{key}", "gives each device of a worker a rank, and there is one"),
            severity=Severity.WARNING,
            hints=("`--set 'device_config.mesh_shape=[1, 2]'` gives each worker two ranks",),
        )


def _tensor_parallel(loaded: LoadedConfig, *, splits: bool) -> Iterator[Diagnostic]:
    """`splits`: Whether the recipe has a layout, other than the chosen one, whose workers split the model."""
    if loaded.checked.device_config.enable_tp and splits:
        yield Diagnostic(
            "C020",
            "`enable_tp` is true but has no effect: one process has the whole model",
            _label(
                loaded,
                "device_config.enable_tp",
                "splits the model over the ranks of a worker, of which there are none",
            ),
            severity=Severity.WARNING,
        )
    elif loaded.checked.device_config.enable_tp:
        yield Diagnostic(
            "C019",
            "`enable_tp` is true but this recipe does not split matrices over devices",
            _label(loaded, "device_config.enable_tp", "nothing would be split"),
            hints=("`--set device_config.enable_tp=false`",),
        )


def _mesh_shape(loaded: LoadedConfig, topology: Topology) -> Iterator[Diagnostic]:
    shape = loaded.checked.device_config.mesh_shape
    if shape is None:
        return
    if not topology.bindings:
        yield Diagnostic(
            "C020",
            f"`mesh_shape` is {shape} but has no effect: configuration `{topology.name}` has no meshes",
            _label(loaded, "device_config.mesh_shape", "each rank computes on one device"),
            severity=Severity.WARNING,
        )
        return
    for binding in topology.bindings:
        mesh = topology.mesh(binding.mesh_id)
        if shape[0] * shape[1] != mesh.devices_per_host:
            rows, columns = mesh.device_shape
            yield Diagnostic(
                "P008",
                f"`mesh_shape` {shape} needs {shape[0] * shape[1]} devices but rank {binding.rank} drives {mesh.devices_per_host}",
                _label(loaded, "device_config.mesh_shape", f"{shape[0]} × {shape[1]} = {shape[0] * shape[1]} devices"),
                (Label(mesh.span, f"mesh {mesh.id}: {rows} × {columns} devices on {counted(mesh.hosts, 'host')}"),),
            )
            return


def _ddp(loaded: LoadedConfig) -> Iterator[Diagnostic]:
    if loaded.checked.device_config.enable_ddp:
        yield Diagnostic(
            "C020",
            "`enable_ddp` is true but has no effect: a rank computes on one device",
            _label(loaded, "device_config.enable_ddp", "averages over the devices of a rank, of which there is one"),
            severity=Severity.WARNING,
        )


def _label(loaded: LoadedConfig, key: str, text: str) -> Label | None:
    span = loaded.span(key)
    return Label(span, text) if span else None
