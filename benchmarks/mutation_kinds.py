"""What an edited description that is accepted may be: equal to the first one, or different in a way that is as right.

A kind is listed here only if nothing else in the files says the same thing again, so that no rule could tell the edit
from what the user meant. What is in no kind has slipped through.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ttlaunch.spec.topology.model import Topology

_SIZES = "another size of model, batch or training"
_RATES = "another setting of the optimizer"
_CHOICES = "another legal choice"
_CODEC = "gradients in more bytes or fewer"
_DRIFT = "another lead of the fastest worker"
_WORLD = "another number of ranks, in a world whose size is open"
_FREE = {
    **dict.fromkeys(("seed", "steps", "num_epochs", "batch_size", "gradient_accumulation_steps"), _SIZES),
    **dict.fromkeys(("micro_batch_size", "validation_interval", "validation_sequences", "validation_fraction"), _SIZES),
    **dict.fromkeys(("num_blocks", "num_heads", "embedding_dim", "max_sequence_length", "dropout_prob"), _SIZES),
    **dict.fromkeys(("megabytes", "repeats", "threads_per_rank", "warmup_steps", "hold_steps"), _SIZES),
    **dict.fromkeys(("vocabulary", "order", "branching", "sequences"), "another chain that nobody draws from"),
    **dict.fromkeys(("early_stop_patience", "early_stop_min_delta", "bucket_megabytes"), _SIZES),
    **dict.fromkeys(("initial_power", "growth_interval", "min_power", "max_power"), _RATES),
    **dict.fromkeys(("beta1", "beta2", "clip_grad_norm_max_norm", "min_learning_rate_ratio"), _RATES),
    **dict.fromkeys(("learning_rate", "epsilon", "weight_decay"), _RATES),
    **dict.fromkeys(("use_clip_grad_norm", "model_type", "tokenizer_type", "optimizer", "type", "device"), _CHOICES),
    **dict.fromkeys(("log_layer_grad_norms", "precision", "activation_checkpointing", "tie_embeddings"), _CHOICES),
    **dict.fromkeys(("checkpoint_config.interval", "keep", "keep_every"), "other checkpoints of the same training"),
    **dict.fromkeys(
        ("compression_config.kind", "block_size", "k", "compression_config.rank", "error_feedback"), _CODEC
    ),
    **dict.fromkeys(
        (
            "every",
            "pull_interval",
            "is_ahead",
            "staleness_bound",
            "staleness_rule",
            "staleness_damping",
            "slow_workers",
        ),
        _DRIFT,
    ),
    **dict.fromkeys(("outer_learning_rate", "outer_momentum", "polyak_interval", "polyak_decay"), _RATES),
    **dict.fromkeys(("straggler", "straggler_timeout_s", "zero_config.stage", "shard"), _CHOICES),
    **dict.fromkeys(("num_servers", "tensor_parallel_config.ranks", "replicas", "ranks_per_stage"), _WORLD),
    "initial_weights": "a file that is looked for when a run is prepared",
    "enabled": "one process instead of several",
    "verify_interval": "other steps at which equal digests are compared",
    "num_workers": _WORLD,
    "pipeline_parallel_config.num_blocks": "a number that was said twice is said once",
}
_HIGHEST = {"learning_rate": 1.0, "epsilon": 0.999, "weight_decay": 10.0}
"""Above these nothing trains, so an edit that leads there is no other setting but a slip."""


def kinds_of_config(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str] | None:
    """The kinds of all keys whose values differ; None if one is in no kind."""
    a, b = dict(_leaves(before)), dict(_leaves(after))
    kinds = set()
    for key in sorted(key for key in a | b if repr(a.get(key)) != repr(b.get(key))):
        section, _, name = key.rpartition(".")
        inner = f"{section.rpartition('.')[2]}.{name}"
        highest = _HIGHEST.get(name)
        if (inner not in _FREE and name not in _FREE) or (highest is not None and b[key] > highest):
            return None
        kinds.add(_FREE.get(inner) or _FREE[name])
    return kinds


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def kinds_of_topology(before: Topology, after: Topology) -> set[str] | None:
    """The kinds of all parts that differ; None if one is in no kind."""
    kinds = set()
    for part in fields(Topology):
        a, b = getattr(before, part.name), getattr(after, part.name)
        if a == b and part.name != "meshes":
            continue
        kind = _PARTS.get(part.name, _nothing)(before, after)
        if kind is None:
            return None
        kinds.add(kind)
    return kinds - {"equal"}


def _nothing(_before: Topology, _after: Topology) -> str | None:
    return None


def _hosts(before: Topology, after: Topology) -> str | None:
    same_slots = [host.slots for host in before.hosts] == [host.slots for host in after.hosts]
    if same_slots:
        return "another host name"
    if before.world_size is None:
        return "another number of slots, in a world whose size is open"
    taken = [(slot.host.name, slot.index) for slot in before.slots[: before.world_size]]
    if taken == [(slot.host.name, slot.index) for slot in after.slots[: before.world_size]]:
        return "more slots than ranks take"
    return None


def _meshes(before: Topology, after: Topology) -> str | None:
    strict = [(mesh, mesh.channels) for mesh in before.meshes], [(mesh, mesh.channels) for mesh in after.meshes]
    if strict[0] == strict[1]:
        return "equal"
    shapes = [[(m.id, m.device_shape, m.host_shape) for m in topology.meshes] for topology in (before, after)]
    wired = [[m.dim_types for m in topology.meshes] for topology in (before, after)]
    if shapes[0] != shapes[1]:
        return "another shape of a mesh, which version 2 says once" if _is_version_2(before) else None
    return "another wiring inside a board" if wired[0] != wired[1] else "another number of channels inside a mesh"


def _is_version_2(topology: Topology) -> bool:
    return topology.mesh_graph_path is not None and topology.mesh_graph_path.suffix == ".textproto"


def _links(before: Topology, after: Topology) -> str | None:
    pairs = [[(link.a, link.b) for link in topology.links] for topology in (before, after)]
    if pairs[0] == pairs[1]:
        return "another number of channels that the ports allow"
    if not after.links:
        return "meshes without any link, as separate machines have them"
    return "another cabling that joins all meshes" if _joined(after) == len(after.meshes) else None


def _joined(topology: Topology) -> int:
    """How many meshes the first one reaches."""
    reached = {topology.meshes[0].id}
    for _ in topology.meshes:
        reached |= {end for link in topology.links if {link.a, link.b} & reached for end in (link.a, link.b)}
    return len(reached)


def _arch(_before: Topology, _after: Topology) -> str:
    return "another chip"


def _free_variable(before: Topology, after: Topology) -> str | None:
    if before.global_environment.keys() == after.global_environment.keys():
        return "another value of a variable that nothing here reads"
    return (
        "a variable of another name, more than one letter away" if not _gone(before, after) else "a variable left out"
    )


def _gone(before: Topology, after: Topology) -> bool:
    return after.global_environment.keys() < before.global_environment.keys()


_PARTS = {
    "hosts": _hosts,
    "meshes": _meshes,
    "links": _links,
    "arch": _arch,
    "global_environment": _free_variable,
}
