"""All that a `trainer.py` imports: rank context, model, optimizer, data, reductions, schedules; every name once.

Names are loaded when they are first used, because all of them together would cost a rank seconds. Type checkers and editors
read the imports below instead, and `dir()` the list after them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttlaunch.runtime.comm.agreement import agree
    from ttlaunch.runtime.comm.collectives import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        chain_all_gather,
        gather,
        reduce,
        reduce_scatter,
    )
    from ttlaunch.runtime.comm.reduction import GradientTree, contiguous_blocks, mean_per_token
    from ttlaunch.runtime.comm.torch_group import process_group
    from ttlaunch.runtime.context import RankContext
    from ttlaunch.runtime.data.batches import micro_batches, validation_micro_batches
    from ttlaunch.runtime.model.losses import count_tokens, summed_loss
    from ttlaunch.runtime.model.model import Model, place_of_second_use
    from ttlaunch.runtime.model.split import split_evenly
    from ttlaunch.runtime.parallel.compression.codec import Codec, build_codec
    from ttlaunch.runtime.parallel.compression.error_feedback import ErrorFeedback
    from ttlaunch.runtime.parallel.compression.exchange import CompressedExchange
    from ttlaunch.runtime.parallel.gradients.exchange import GradientExchange
    from ttlaunch.runtime.parallel.gradients.replicas import replicate
    from ttlaunch.runtime.parallel.gradients.sums import all_reduce_mean, reduce_scatter_mean
    from ttlaunch.runtime.parallel.pipeline.grid import PipelineGrid, place_in_pipeline
    from ttlaunch.runtime.parallel.pipeline.part import PipelinePart
    from ttlaunch.runtime.parallel.pipeline.schedules import Action, order_of_passes
    from ttlaunch.runtime.parallel.pipeline.tuning import ScheduleChoice
    from ttlaunch.runtime.parallel.servers.async_parameter_server import AsyncParameterServer
    from ttlaunch.runtime.parallel.servers.async_parameter_server_client import AsyncParameterServerClient
    from ttlaunch.runtime.parallel.servers.parameter_server import ParameterServer, Patience
    from ttlaunch.runtime.parallel.servers.parameter_server_client import ParameterServerClient
    from ttlaunch.runtime.parallel.servers.polyak import AveragedState, PolyakAverage, restore_averaged
    from ttlaunch.runtime.parallel.servers.shard import ParameterShard, build_shard, cut_values, shared_norm
    from ttlaunch.runtime.parallel.servers.slow_down import slowed
    from ttlaunch.runtime.parallel.servers.snapshot import SnapshotValidation, begin_task
    from ttlaunch.runtime.parallel.servers.step_size import StalenessCounts, step_size
    from ttlaunch.runtime.parallel.servers.tasks import TaskedState, TaskList
    from ttlaunch.runtime.parallel.sharded.model import ShardedModel, shard_model
    from ttlaunch.runtime.parallel.sharded.shards import Shards
    from ttlaunch.runtime.parallel.shared_validation import share_validation
    from ttlaunch.runtime.parallel.staleness.exchange import MeanGradients, mean_gradients
    from ttlaunch.runtime.parallel.staleness.local_replica import LocalReplica
    from ttlaunch.runtime.parallel.tensor.grid import RankGrid, place_in_grid
    from ttlaunch.runtime.parallel.tensor.norms import squared_norms
    from ttlaunch.runtime.parallel.tensor.share import ModelShare, share_of
    from ttlaunch.runtime.parallel.tiers.aggregator_and_optimizer import AggregatorToOptimizer, OptimizerToAggregator
    from ttlaunch.runtime.parallel.tiers.bucketed_update import BucketedUpdate, update_order
    from ttlaunch.runtime.parallel.tiers.gradient_aggregator import GradientAggregator
    from ttlaunch.runtime.parallel.tiers.local_ranks import (
        WorkerGroup,
        build_aggregator,
        own_group,
        ranks_of_share,
        receive_validation,
        send_validation,
        worker_groups,
    )
    from ttlaunch.runtime.parallel.tiers.remote_optimizer import RemoteOptimizer
    from ttlaunch.runtime.parallel.zero.gradients import ScatteredGradients
    from ttlaunch.runtime.parallel.zero.layout import ShardLayout
    from ttlaunch.runtime.parallel.zero.memory import report_memory
    from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
    from ttlaunch.runtime.parallel.zero.passes import LayerPasses, losses_by_layer
    from ttlaunch.runtime.parallel.zero.shared_norms import SharedNorms
    from ttlaunch.runtime.parallel.zero.weights import GatheredWeights
    from ttlaunch.runtime.training.loop import TrainingLoop
    from ttlaunch.runtime.training.one_process import train_in_one_process
    from ttlaunch.runtime.training.optimizers import (
        Optimizer,
        build_optimizer,
        global_norm,
        learning_rate,
        norms_of_layers,
    )
    from ttlaunch.runtime.training.passes import differentiate, in_step, mean_gradient
    from ttlaunch.runtime.training.rank_model import build_model
    from ttlaunch.runtime.training.validation import report_layer_norms, validation_is_due, validation_losses

__all__ = [
    "Action",
    "AggregatorToOptimizer",
    "AsyncParameterServer",
    "AsyncParameterServerClient",
    "AveragedState",
    "BucketedUpdate",
    "Codec",
    "CompressedExchange",
    "ErrorFeedback",
    "GatheredWeights",
    "GradientAggregator",
    "GradientExchange",
    "GradientTree",
    "LayerPasses",
    "LocalReplica",
    "MeanGradients",
    "Model",
    "ModelShare",
    "Optimizer",
    "OptimizerToAggregator",
    "OwnedParameters",
    "ParameterServer",
    "ParameterServerClient",
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
    "TaskList",
    "TaskedState",
    "TrainingLoop",
    "WorkerGroup",
    "agree",
    "all_gather",
    "all_reduce",
    "all_reduce_mean",
    "barrier",
    "begin_task",
    "broadcast",
    "build_aggregator",
    "build_codec",
    "build_model",
    "build_optimizer",
    "build_shard",
    "chain_all_gather",
    "contiguous_blocks",
    "count_tokens",
    "cut_values",
    "differentiate",
    "gather",
    "global_norm",
    "in_step",
    "learning_rate",
    "losses_by_layer",
    "mean_gradient",
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
    "share_validation",
    "shared_norm",
    "slowed",
    "split_evenly",
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
    "comm.agreement": ("agree",),
    "parallel.tiers.aggregator_and_optimizer": ("OptimizerToAggregator", "AggregatorToOptimizer"),
    "parallel.tiers.bucketed_update": ("BucketedUpdate", "update_order"),
    "comm.collectives": (
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "chain_all_gather",
        "gather",
        "reduce",
        "reduce_scatter",
    ),
    "parallel.compression.codec": ("Codec", "build_codec"),
    "parallel.compression.error_feedback": ("ErrorFeedback",),
    "parallel.compression.exchange": ("CompressedExchange",),
    "context": ("RankContext",),
    "data.batches": ("micro_batches", "validation_micro_batches"),
    "parallel.gradients.exchange": ("GradientExchange",),
    "parallel.tiers.gradient_aggregator": ("GradientAggregator",),
    "parallel.gradients.sums": ("all_reduce_mean", "reduce_scatter_mean"),
    "model.losses": ("count_tokens", "summed_loss"),
    "model.model": ("Model", "place_of_second_use"),
    "model.split": ("split_evenly",),
    "training.rank_model": ("build_model",),
    "training.loop": ("TrainingLoop",),
    "parallel.shared_validation": ("share_validation",),
    "training.one_process": ("train_in_one_process",),
    "training.optimizers": ("Optimizer", "build_optimizer", "global_norm", "learning_rate", "norms_of_layers"),
    "training.passes": ("differentiate", "in_step", "mean_gradient"),
    "parallel.pipeline.grid": ("PipelineGrid", "place_in_pipeline"),
    "parallel.pipeline.part": ("PipelinePart",),
    "parallel.pipeline.tuning": ("ScheduleChoice",),
    "comm.reduction": ("GradientTree", "contiguous_blocks", "mean_per_token"),
    "parallel.tensor.grid": ("RankGrid", "place_in_grid"),
    "parallel.tensor.norms": ("squared_norms",),
    "parallel.tensor.share": ("ModelShare", "share_of"),
    "parallel.tiers.remote_optimizer": ("RemoteOptimizer",),
    "parallel.gradients.replicas": ("replicate",),
    "parallel.sharded.model": ("ShardedModel", "shard_model"),
    "parallel.sharded.shards": ("Shards",),
    "parallel.pipeline.schedules": ("Action", "order_of_passes"),
    "comm.torch_group": ("process_group",),
    "parallel.staleness.exchange": ("MeanGradients", "mean_gradients"),
    "parallel.staleness.local_replica": ("LocalReplica",),
    "parallel.tiers.local_ranks": (
        "WorkerGroup",
        "build_aggregator",
        "own_group",
        "ranks_of_share",
        "receive_validation",
        "send_validation",
        "worker_groups",
    ),
    "parallel.servers.async_parameter_server": ("AsyncParameterServer",),
    "parallel.servers.async_parameter_server_client": ("AsyncParameterServerClient",),
    "parallel.servers.snapshot": ("SnapshotValidation", "begin_task"),
    "parallel.servers.step_size": ("StalenessCounts", "step_size"),
    "parallel.servers.tasks": ("TaskList", "TaskedState"),
    "parallel.servers.polyak": ("AveragedState", "PolyakAverage", "restore_averaged"),
    "parallel.servers.shard": ("ParameterShard", "build_shard", "cut_values", "shared_norm"),
    "parallel.servers.slow_down": ("slowed",),
    "parallel.servers.parameter_server": ("Patience", "ParameterServer"),
    "parallel.servers.parameter_server_client": ("ParameterServerClient",),
    "training.validation": ("report_layer_norms", "validation_is_due", "validation_losses"),
    "parallel.zero.gradients": ("ScatteredGradients",),
    "parallel.zero.layout": ("ShardLayout",),
    "parallel.zero.memory": ("report_memory",),
    "parallel.zero.owned": ("OwnedParameters",),
    "parallel.zero.passes": ("LayerPasses", "losses_by_layer"),
    "parallel.zero.shared_norms": ("SharedNorms",),
    "parallel.zero.weights": ("GatheredWeights",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

OLD_NAMES = {
    "AggregatorLink": "OptimizerToAggregator",
    "ElasticDesk": "AsyncParameterServer",
    "ElasticLink": "AsyncParameterServerClient",
    "GradientHub": "GradientAggregator",
    "OptimizerLink": "AggregatorToOptimizer",
    "SyncDesk": "ParameterServer",
    "SyncLink": "ParameterServerClient",
    "build_hub": "build_aggregator",
}
"""Former names, which trainers of users may still import; `dir()` and tools show only the present ones."""


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # with it, a type checker would take any misspelled name for an `object`

    def __getattr__(name):  # noqa: ANN001, ANN202
        name = OLD_NAMES.get(name, name)
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"ttlaunch.runtime.{_HOMES[name]}"), name)
