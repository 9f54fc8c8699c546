"""All that a `trainer.py` may import: rank context, model, optimizer, data, reductions, schedules.

Names are loaded when they are first used, so that a rank can check its world before it spends seconds on torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttlaunch.runtime.collectives.agreement import agree
    from ttlaunch.runtime.collectives.collectives import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        chain_all_gather,
        gather,
        reduce,
        reduce_scatter,
    )
    from ttlaunch.runtime.collectives.reduction import GradientTree, contiguous_blocks
    from ttlaunch.runtime.collectives.torch_group import process_group
    from ttlaunch.runtime.compression.codec import Codec, build_codec
    from ttlaunch.runtime.compression.error_feedback import ErrorFeedback
    from ttlaunch.runtime.compression.exchange import CompressedExchange
    from ttlaunch.runtime.context import RankContext
    from ttlaunch.runtime.data.batches import micro_batches, validation_micro_batches
    from ttlaunch.runtime.gradients.exchange import GradientExchange
    from ttlaunch.runtime.gradients.replicas import replicate
    from ttlaunch.runtime.gradients.sums import all_reduce_mean, reduce_scatter_mean
    from ttlaunch.runtime.model.model import Model, build_model
    from ttlaunch.runtime.model.tied import place_of_second_use
    from ttlaunch.runtime.pipeline.grid import PipelineGrid, place_in_pipeline
    from ttlaunch.runtime.pipeline.part import PipelinePart
    from ttlaunch.runtime.pipeline.schedules import Action, order_of_passes
    from ttlaunch.runtime.pipeline.tuning import ScheduleChoice
    from ttlaunch.runtime.servers.elastic_desk import ElasticDesk
    from ttlaunch.runtime.servers.elastic_link import ElasticLink
    from ttlaunch.runtime.servers.polyak import AveragedState, PolyakAverage, restore_averaged
    from ttlaunch.runtime.servers.shard import ParameterShard, build_shard, shared_norm
    from ttlaunch.runtime.servers.slow_down import slowed
    from ttlaunch.runtime.servers.snapshot import SnapshotValidation, begin_task
    from ttlaunch.runtime.servers.step_size import StalenessCounts, step_size
    from ttlaunch.runtime.servers.sync_desk import Patience, SyncDesk
    from ttlaunch.runtime.servers.sync_link import SyncLink
    from ttlaunch.runtime.servers.tasks import TaskedState, TaskList
    from ttlaunch.runtime.sharded.model import ShardedModel, shard_model
    from ttlaunch.runtime.sharded.shards import Shards
    from ttlaunch.runtime.staleness.exchange import MeanGradients, mean_gradients
    from ttlaunch.runtime.staleness.local_replica import LocalReplica
    from ttlaunch.runtime.tensor.grid import RankGrid, place_in_grid
    from ttlaunch.runtime.tensor.norms import squared_norms
    from ttlaunch.runtime.tensor.share import ModelShare, share_of
    from ttlaunch.runtime.tiers.bucket_link import AggregatorLink, OptimizerLink
    from ttlaunch.runtime.tiers.bucketed_update import BucketedUpdate, update_order
    from ttlaunch.runtime.tiers.gradient_hub import GradientHub
    from ttlaunch.runtime.tiers.local_ranks import (
        WorkerGroup,
        build_hub,
        own_group,
        ranks_of_share,
        receive_validation,
        send_validation,
        worker_groups,
    )
    from ttlaunch.runtime.tiers.remote_optimizer import RemoteOptimizer
    from ttlaunch.runtime.training.losses import count_tokens, mean_per_token, summed_loss
    from ttlaunch.runtime.training.one_process import train_in_one_process
    from ttlaunch.runtime.training.optimizers import (
        Optimizer,
        build_optimizer,
        global_norm,
        learning_rate,
        norms_of_layers,
    )
    from ttlaunch.runtime.training.passes import differentiate, in_step
    from ttlaunch.runtime.training.validation import report_layer_norms, validation_is_due, validation_losses
    from ttlaunch.runtime.zero.gradients import ScatteredGradients
    from ttlaunch.runtime.zero.layout import ShardLayout
    from ttlaunch.runtime.zero.memory import report_memory
    from ttlaunch.runtime.zero.owned import OwnedParameters
    from ttlaunch.runtime.zero.passes import LayerPasses, losses_by_layer
    from ttlaunch.runtime.zero.shared_norms import SharedNorms
    from ttlaunch.runtime.zero.weights import GatheredWeights

__all__ = [
    "Action",
    "AggregatorLink",
    "AveragedState",
    "BucketedUpdate",
    "Codec",
    "CompressedExchange",
    "ElasticDesk",
    "ElasticLink",
    "ErrorFeedback",
    "GatheredWeights",
    "GradientExchange",
    "GradientHub",
    "GradientTree",
    "LayerPasses",
    "LocalReplica",
    "MeanGradients",
    "Model",
    "ModelShare",
    "Optimizer",
    "OptimizerLink",
    "OwnedParameters",
    "ParameterShard",
    "Patience",
    "PipelineGrid",
    "PipelinePart",
    "PolyakAverage",
    "RankContext",
    "RankGrid",
    "RemoteOptimizer",
    "ScatteredGradients",
    "ScheduleChoice",
    "ShardLayout",
    "ShardedModel",
    "Shards",
    "SharedNorms",
    "SnapshotValidation",
    "StalenessCounts",
    "SyncDesk",
    "SyncLink",
    "TaskList",
    "TaskedState",
    "WorkerGroup",
    "agree",
    "all_gather",
    "all_reduce",
    "all_reduce_mean",
    "barrier",
    "begin_task",
    "broadcast",
    "build_codec",
    "build_hub",
    "build_model",
    "build_optimizer",
    "build_shard",
    "chain_all_gather",
    "contiguous_blocks",
    "count_tokens",
    "differentiate",
    "gather",
    "global_norm",
    "in_step",
    "learning_rate",
    "losses_by_layer",
    "mean_gradients",
    "mean_per_token",
    "micro_batches",
    "norms_of_layers",
    "order_of_passes",
    "own_group",
    "place_in_grid",
    "place_in_pipeline",
    "place_of_second_use",
    "process_group",
    "ranks_of_share",
    "receive_validation",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_mean",
    "replicate",
    "report_layer_norms",
    "report_memory",
    "restore_averaged",
    "send_validation",
    "shard_model",
    "share_of",
    "shared_norm",
    "slowed",
    "squared_norms",
    "step_size",
    "summed_loss",
    "train_in_one_process",
    "update_order",
    "validation_is_due",
    "validation_losses",
    "validation_micro_batches",
    "worker_groups",
]

_MODULES = {
    "collectives.agreement": ("agree",),
    "tiers.bucket_link": ("AggregatorLink", "OptimizerLink"),
    "tiers.bucketed_update": ("BucketedUpdate", "update_order"),
    "collectives.collectives": (
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "chain_all_gather",
        "gather",
        "reduce",
        "reduce_scatter",
    ),
    "compression.codec": ("Codec", "build_codec"),
    "compression.error_feedback": ("ErrorFeedback",),
    "compression.exchange": ("CompressedExchange",),
    "context": ("RankContext",),
    "data.batches": ("micro_batches", "validation_micro_batches"),
    "gradients.exchange": ("GradientExchange",),
    "tiers.gradient_hub": ("GradientHub",),
    "gradients.sums": ("all_reduce_mean", "reduce_scatter_mean"),
    "training.losses": ("count_tokens", "mean_per_token", "summed_loss"),
    "model.model": ("Model", "build_model"),
    "model.tied": ("place_of_second_use",),
    "training.one_process": ("train_in_one_process",),
    "training.optimizers": ("Optimizer", "build_optimizer", "global_norm", "learning_rate", "norms_of_layers"),
    "training.passes": ("differentiate", "in_step"),
    "pipeline.grid": ("PipelineGrid", "place_in_pipeline"),
    "pipeline.part": ("PipelinePart",),
    "pipeline.tuning": ("ScheduleChoice",),
    "collectives.reduction": ("GradientTree", "contiguous_blocks"),
    "tensor.grid": ("RankGrid", "place_in_grid"),
    "tensor.norms": ("squared_norms",),
    "tensor.share": ("ModelShare", "share_of"),
    "tiers.remote_optimizer": ("RemoteOptimizer",),
    "gradients.replicas": ("replicate",),
    "sharded.model": ("ShardedModel", "shard_model"),
    "sharded.shards": ("Shards",),
    "pipeline.schedules": ("Action", "order_of_passes"),
    "collectives.torch_group": ("process_group",),
    "staleness.exchange": ("MeanGradients", "mean_gradients"),
    "staleness.local_replica": ("LocalReplica",),
    "tiers.local_ranks": (
        "WorkerGroup",
        "build_hub",
        "own_group",
        "ranks_of_share",
        "receive_validation",
        "send_validation",
        "worker_groups",
    ),
    "servers.elastic_desk": ("ElasticDesk",),
    "servers.elastic_link": ("ElasticLink",),
    "servers.snapshot": ("SnapshotValidation", "begin_task"),
    "servers.step_size": ("StalenessCounts", "step_size"),
    "servers.tasks": ("TaskList", "TaskedState"),
    "servers.polyak": ("AveragedState", "PolyakAverage", "restore_averaged"),
    "servers.shard": ("ParameterShard", "build_shard", "shared_norm"),
    "servers.slow_down": ("slowed",),
    "servers.sync_desk": ("Patience", "SyncDesk"),
    "servers.sync_link": ("SyncLink",),
    "training.validation": ("report_layer_norms", "validation_is_due", "validation_losses"),
    "zero.gradients": ("ScatteredGradients",),
    "zero.layout": ("ShardLayout",),
    "zero.memory": ("report_memory",),
    "zero.owned": ("OwnedParameters",),
    "zero.passes": ("LayerPasses", "losses_by_layer"),
    "zero.shared_norms": ("SharedNorms",),
    "zero.weights": ("GatheredWeights",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
