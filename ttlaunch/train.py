"""All that a `trainer.py` imports: rank context, model, optimizer, data, reductions, schedules; every name once.

A name is loaded when it is first used, because all of them together would cost a rank seconds. The imports below are the only
list: type checkers and editors read them as they stand, and a rank looks up in them which module defines a name.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

# `a as a` marks a name as public for type checkers.
if TYPE_CHECKING:
    from ttlaunch.membership.tasks import TaskList as TaskList
    from ttlaunch.runtime.checkpoint.checkpoints import held_tensors as held_tensors
    from ttlaunch.runtime.comm.agreement import agree as agree
    from ttlaunch.runtime.comm.collectives import all_gather as all_gather
    from ttlaunch.runtime.comm.collectives import all_reduce as all_reduce
    from ttlaunch.runtime.comm.collectives import barrier as barrier
    from ttlaunch.runtime.comm.collectives import broadcast as broadcast
    from ttlaunch.runtime.comm.collectives import chain_all_gather as chain_all_gather
    from ttlaunch.runtime.comm.collectives import gather as gather
    from ttlaunch.runtime.comm.collectives import reduce as reduce
    from ttlaunch.runtime.comm.collectives import reduce_scatter as reduce_scatter
    from ttlaunch.runtime.comm.reduction import GradientTree as GradientTree
    from ttlaunch.runtime.comm.reduction import contiguous_blocks as contiguous_blocks
    from ttlaunch.runtime.comm.reduction import mean_per_token as mean_per_token
    from ttlaunch.runtime.comm.torch_group import process_group as process_group
    from ttlaunch.runtime.context import RankContext as RankContext
    from ttlaunch.runtime.data.batches import MicroBatch as MicroBatch
    from ttlaunch.runtime.data.batches import micro_batches as micro_batches
    from ttlaunch.runtime.data.batches import validation_micro_batches as validation_micro_batches
    from ttlaunch.runtime.model.losses import count_tokens as count_tokens
    from ttlaunch.runtime.model.losses import summed_loss as summed_loss
    from ttlaunch.runtime.model.model import Model as Model
    from ttlaunch.runtime.model.model import place_of_second_use as place_of_second_use
    from ttlaunch.runtime.model.split import split_evenly as split_evenly
    from ttlaunch.runtime.parallel.compression.codec import Codec as Codec
    from ttlaunch.runtime.parallel.compression.codec import build_codec as build_codec
    from ttlaunch.runtime.parallel.compression.error_feedback import ErrorFeedback as ErrorFeedback
    from ttlaunch.runtime.parallel.compression.exchange import CompressedExchange as CompressedExchange
    from ttlaunch.runtime.parallel.gradients.elastic_exchange import ElasticExchange as ElasticExchange
    from ttlaunch.runtime.parallel.gradients.exchange import GradientExchange as GradientExchange
    from ttlaunch.runtime.parallel.gradients.replicas import replicate as replicate
    from ttlaunch.runtime.parallel.gradients.sums import all_reduce_mean as all_reduce_mean
    from ttlaunch.runtime.parallel.gradients.sums import reduce_scatter_mean as reduce_scatter_mean
    from ttlaunch.runtime.parallel.pipeline.grid import PipelineGrid as PipelineGrid
    from ttlaunch.runtime.parallel.pipeline.grid import place_in_pipeline as place_in_pipeline
    from ttlaunch.runtime.parallel.pipeline.part import PipelinePart as PipelinePart
    from ttlaunch.runtime.parallel.pipeline.schedules import Action as Action
    from ttlaunch.runtime.parallel.pipeline.schedules import order_of_passes as order_of_passes
    from ttlaunch.runtime.parallel.pipeline.tuning import ScheduleChoice as ScheduleChoice
    from ttlaunch.runtime.parallel.recorded_updates import MeanAlongTree as MeanAlongTree
    from ttlaunch.runtime.parallel.recorded_updates import MeanAroundRing as MeanAroundRing
    from ttlaunch.runtime.parallel.recorded_updates import repeat_updates as repeat_updates
    from ttlaunch.runtime.parallel.servers.async_parameter_server import AsyncParameterServer as AsyncParameterServer
    from ttlaunch.runtime.parallel.servers.async_parameter_server import StalenessCounts as StalenessCounts
    from ttlaunch.runtime.parallel.servers.async_parameter_server import step_size as step_size
    from ttlaunch.runtime.parallel.servers.async_parameter_server_client import (
        AsyncParameterServerClient as AsyncParameterServerClient,
    )
    from ttlaunch.runtime.parallel.servers.async_parameter_server_client import slowed as slowed
    from ttlaunch.runtime.parallel.servers.elastic_tasks_client import ElasticTaskClient as ElasticTaskClient
    from ttlaunch.runtime.parallel.servers.elastic_tasks_client import parts_of as parts_of
    from ttlaunch.runtime.parallel.servers.elastic_tasks_server import ElasticTaskServer as ElasticTaskServer
    from ttlaunch.runtime.parallel.servers.parameter_server import ParameterServer as ParameterServer
    from ttlaunch.runtime.parallel.servers.parameter_server import Patience as Patience
    from ttlaunch.runtime.parallel.servers.parameter_server_client import ParameterServerClient as ParameterServerClient
    from ttlaunch.runtime.parallel.servers.polyak import AveragedState as AveragedState
    from ttlaunch.runtime.parallel.servers.polyak import PolyakAverage as PolyakAverage
    from ttlaunch.runtime.parallel.servers.polyak import restore_averaged as restore_averaged
    from ttlaunch.runtime.parallel.servers.shard import ParameterShard as ParameterShard
    from ttlaunch.runtime.parallel.servers.shard import build_shard as build_shard
    from ttlaunch.runtime.parallel.servers.shard import cut_values as cut_values
    from ttlaunch.runtime.parallel.servers.shard import shared_norm as shared_norm
    from ttlaunch.runtime.parallel.servers.snapshot import SnapshotValidation as SnapshotValidation
    from ttlaunch.runtime.parallel.servers.snapshot import begin_task as begin_task
    from ttlaunch.runtime.parallel.servers.tasks import TaskedState as TaskedState
    from ttlaunch.runtime.parallel.serving.columns import ColumnModel as ColumnModel
    from ttlaunch.runtime.parallel.serving.columns import columns_among as columns_among
    from ttlaunch.runtime.parallel.serving.columns import run_share as run_share
    from ttlaunch.runtime.parallel.serving.exactness import agree_on_padding as agree_on_padding
    from ttlaunch.runtime.parallel.serving.exactness import why_not_exact as why_not_exact
    from ttlaunch.runtime.parallel.serving.head import Served as Served
    from ttlaunch.runtime.parallel.serving.head import answer_asks as answer_asks
    from ttlaunch.runtime.parallel.serving.head import describe_served as describe_served
    from ttlaunch.runtime.parallel.serving.stages import StagedModel as StagedModel
    from ttlaunch.runtime.parallel.serving.stages import StageSizes as StageSizes
    from ttlaunch.runtime.parallel.serving.stages import run_stage as run_stage
    from ttlaunch.runtime.parallel.serving.weights import build_served_model as build_served_model
    from ttlaunch.runtime.parallel.shadowed.training import train_with_shadows as train_with_shadows
    from ttlaunch.runtime.parallel.shadowed.update import ShadowedUpdate as ShadowedUpdate
    from ttlaunch.runtime.parallel.sharded.model import ShardedModel as ShardedModel
    from ttlaunch.runtime.parallel.sharded.model import shard_model as shard_model
    from ttlaunch.runtime.parallel.sharded.shards import Shards as Shards
    from ttlaunch.runtime.parallel.shared_validation import share_validation as share_validation
    from ttlaunch.runtime.parallel.shared_validation import validate_together as validate_together
    from ttlaunch.runtime.parallel.staleness.exchange import MeanGradients as MeanGradients
    from ttlaunch.runtime.parallel.staleness.local_replica import LocalReplica as LocalReplica
    from ttlaunch.runtime.parallel.staleness.means import mean_gradients as mean_gradients
    from ttlaunch.runtime.parallel.tensor.grid import RankGrid as RankGrid
    from ttlaunch.runtime.parallel.tensor.grid import place_in_grid as place_in_grid
    from ttlaunch.runtime.parallel.tensor.norms import squared_norms as squared_norms
    from ttlaunch.runtime.parallel.tensor.share import ModelShare as ModelShare
    from ttlaunch.runtime.parallel.tensor.share import share_of as share_of
    from ttlaunch.runtime.parallel.tiers.aggregator_and_optimizer import AggregatorToOptimizer as AggregatorToOptimizer
    from ttlaunch.runtime.parallel.tiers.aggregator_and_optimizer import OptimizerToAggregator as OptimizerToAggregator
    from ttlaunch.runtime.parallel.tiers.bucketed_update import BucketedUpdate as BucketedUpdate
    from ttlaunch.runtime.parallel.tiers.bucketed_update import update_order as update_order
    from ttlaunch.runtime.parallel.tiers.gradient_aggregator import GradientAggregator as GradientAggregator
    from ttlaunch.runtime.parallel.tiers.local_ranks import WorkerGroup as WorkerGroup
    from ttlaunch.runtime.parallel.tiers.local_ranks import build_aggregator as build_aggregator
    from ttlaunch.runtime.parallel.tiers.local_ranks import own_group as own_group
    from ttlaunch.runtime.parallel.tiers.local_ranks import ranks_of_share as ranks_of_share
    from ttlaunch.runtime.parallel.tiers.local_ranks import receive_validation as receive_validation
    from ttlaunch.runtime.parallel.tiers.local_ranks import send_validation as send_validation
    from ttlaunch.runtime.parallel.tiers.local_ranks import worker_groups as worker_groups
    from ttlaunch.runtime.parallel.tiers.remote_optimizer import RemoteOptimizer as RemoteOptimizer
    from ttlaunch.runtime.parallel.zero.audited import audited as audited
    from ttlaunch.runtime.parallel.zero.elastic import ElasticShards as ElasticShards
    from ttlaunch.runtime.parallel.zero.gradients import ScatteredGradients as ScatteredGradients
    from ttlaunch.runtime.parallel.zero.layout import ShardLayout as ShardLayout
    from ttlaunch.runtime.parallel.zero.memory import report_memory as report_memory
    from ttlaunch.runtime.parallel.zero.owned import OwnedParameters as OwnedParameters
    from ttlaunch.runtime.parallel.zero.passes import LayerPasses as LayerPasses
    from ttlaunch.runtime.parallel.zero.passes import losses_by_layer as losses_by_layer
    from ttlaunch.runtime.parallel.zero.shared_norms import SharedNorms as SharedNorms
    from ttlaunch.runtime.parallel.zero.weights import GatheredWeights as GatheredWeights
    from ttlaunch.runtime.serving.ask import Limits as Limits
    from ttlaunch.runtime.serving.engine import Engine as Engine
    from ttlaunch.runtime.serving.folder_tokenizer import read_tokenizer as read_tokenizer
    from ttlaunch.runtime.serving.forward import CachedPart as CachedPart
    from ttlaunch.runtime.serving.products import Products as Products
    from ttlaunch.runtime.serving.text import NamedTokenizer as NamedTokenizer
    from ttlaunch.runtime.serving.text import make_tokenizer as make_tokenizer
    from ttlaunch.runtime.training.loop import TrainingLoop as TrainingLoop
    from ttlaunch.runtime.training.one_process import train_in_one_process as train_in_one_process
    from ttlaunch.runtime.training.optimizers import Optimizer as Optimizer
    from ttlaunch.runtime.training.optimizers import build_optimizer as build_optimizer
    from ttlaunch.runtime.training.optimizers import global_norm as global_norm
    from ttlaunch.runtime.training.optimizers import learning_rate as learning_rate
    from ttlaunch.runtime.training.optimizers import norms_of_layers as norms_of_layers
    from ttlaunch.runtime.training.passes import differentiate as differentiate
    from ttlaunch.runtime.training.passes import differentiated as differentiated
    from ttlaunch.runtime.training.passes import in_step as in_step
    from ttlaunch.runtime.training.passes import mean_gradient as mean_gradient
    from ttlaunch.runtime.training.rank_model import build_model as build_model
    from ttlaunch.runtime.training.validation import report_layer_norms as report_layer_norms
    from ttlaunch.runtime.training.validation import validation_is_due as validation_is_due
    from ttlaunch.runtime.training.validation import validation_losses as validation_losses
    from ttlaunch.spec.recipe.serving import blocks_of_stages as blocks_of_stages
    from ttlaunch.spec.recipe.serving import cache_bytes_of_token as cache_bytes_of_token


def _find_modules() -> dict[str, str]:
    """Return the module that defines each name, read from the imports above."""
    imports = next(node for node in ast.parse(Path(__file__).read_bytes()).body if isinstance(node, ast.If))
    return {
        node.names[0].name: node.module for node in imports.body if isinstance(node, ast.ImportFrom) and node.module
    }


_MODULES = _find_modules()

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
    return list(_MODULES)


# A type checker would take a computed `__all__` for an empty one, and with `__getattr__` a misspelled name for an `object`.
if not TYPE_CHECKING:
    __all__ = list(_MODULES)

    def __getattr__(name):  # noqa: ANN001, ANN202
        name = OLD_NAMES.get(name, name)
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)
