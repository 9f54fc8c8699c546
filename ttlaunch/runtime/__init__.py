"""All that a `trainer.py` may import: rank context, model, optimizer, data, reductions, schedules.

Names are loaded when they are first used, so that a rank can check its world before it spends seconds on torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttlaunch.runtime.agreement import agree
    from ttlaunch.runtime.bucket_link import AggregatorLink, OptimizerLink
    from ttlaunch.runtime.bucketed_update import BucketedUpdate, update_order
    from ttlaunch.runtime.collectives import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        chain_all_gather,
        gather,
        reduce,
        reduce_scatter,
    )
    from ttlaunch.runtime.context import RankContext
    from ttlaunch.runtime.data import micro_batches, validation_micro_batches
    from ttlaunch.runtime.gradient_exchange import GradientExchange
    from ttlaunch.runtime.gradient_hub import GradientHub
    from ttlaunch.runtime.gradient_sums import all_reduce_mean, reduce_scatter_mean
    from ttlaunch.runtime.local_ranks import (
        WorkerGroup,
        build_hub,
        own_group,
        receive_validation,
        send_validation,
        worker_groups,
    )
    from ttlaunch.runtime.losses import count_tokens, mean_per_token, summed_loss
    from ttlaunch.runtime.model import Model, build_model
    from ttlaunch.runtime.one_process import train_in_one_process
    from ttlaunch.runtime.optimizers import Optimizer, build_optimizer, global_norm, learning_rate
    from ttlaunch.runtime.passes import differentiate
    from ttlaunch.runtime.pipeline_grid import PipelineGrid, place_in_pipeline
    from ttlaunch.runtime.pipeline_part import PipelinePart
    from ttlaunch.runtime.pipeline_tuning import ScheduleChoice
    from ttlaunch.runtime.reduction import GradientTree, contiguous_blocks
    from ttlaunch.runtime.remote_optimizer import RemoteOptimizer
    from ttlaunch.runtime.replicas import replicate
    from ttlaunch.runtime.schedules import Action, order_of_passes
    from ttlaunch.runtime.torch_group import process_group
    from ttlaunch.runtime.validation import report_layer_norms, validation_is_due, validation_losses

__all__ = [
    "Action",
    "AggregatorLink",
    "BucketedUpdate",
    "GradientExchange",
    "GradientHub",
    "GradientTree",
    "Model",
    "Optimizer",
    "OptimizerLink",
    "PipelineGrid",
    "PipelinePart",
    "RankContext",
    "RemoteOptimizer",
    "ScheduleChoice",
    "WorkerGroup",
    "agree",
    "all_gather",
    "all_reduce",
    "all_reduce_mean",
    "barrier",
    "broadcast",
    "build_hub",
    "build_model",
    "build_optimizer",
    "chain_all_gather",
    "contiguous_blocks",
    "count_tokens",
    "differentiate",
    "gather",
    "global_norm",
    "learning_rate",
    "mean_per_token",
    "micro_batches",
    "order_of_passes",
    "own_group",
    "place_in_pipeline",
    "process_group",
    "receive_validation",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_mean",
    "replicate",
    "report_layer_norms",
    "send_validation",
    "summed_loss",
    "train_in_one_process",
    "update_order",
    "validation_is_due",
    "validation_losses",
    "validation_micro_batches",
    "worker_groups",
]

_MODULES = {
    "agreement": ("agree",),
    "bucket_link": ("AggregatorLink", "OptimizerLink"),
    "bucketed_update": ("BucketedUpdate", "update_order"),
    "collectives": (
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "chain_all_gather",
        "gather",
        "reduce",
        "reduce_scatter",
    ),
    "context": ("RankContext",),
    "data": ("micro_batches", "validation_micro_batches"),
    "gradient_exchange": ("GradientExchange",),
    "gradient_hub": ("GradientHub",),
    "gradient_sums": ("all_reduce_mean", "reduce_scatter_mean"),
    "losses": ("count_tokens", "mean_per_token", "summed_loss"),
    "model": ("Model", "build_model"),
    "one_process": ("train_in_one_process",),
    "optimizers": ("Optimizer", "build_optimizer", "global_norm", "learning_rate"),
    "passes": ("differentiate",),
    "pipeline_grid": ("PipelineGrid", "place_in_pipeline"),
    "pipeline_part": ("PipelinePart",),
    "pipeline_tuning": ("ScheduleChoice",),
    "reduction": ("GradientTree", "contiguous_blocks"),
    "remote_optimizer": ("RemoteOptimizer",),
    "replicas": ("replicate",),
    "schedules": ("Action", "order_of_passes"),
    "torch_group": ("process_group",),
    "local_ranks": (
        "WorkerGroup",
        "build_hub",
        "own_group",
        "receive_validation",
        "send_validation",
        "worker_groups",
    ),
    "validation": ("report_layer_norms", "validation_is_due", "validation_losses"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
