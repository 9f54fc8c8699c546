"""How a recipe declares itself, without torch: configuration, roles, who talks to whom.

A `recipe.py` imports only this package. The launcher reads it to check the configuration, lay the roles out and print
the plan; the rank reads it to validate the same configuration again.
"""

from ttlaunch.located.schema import Section
from ttlaunch.recipe.blocks import aligned_subtrees, contiguous_blocks
from ttlaunch.recipe.checks import (
    every_replica_has_a_micro_batch,
    every_stage_has_a_block,
    every_worker_has_a_micro_batch,
    no_layer_needs_the_matrix_of_another,
    num_workers_counts_the_stages,
    the_schedule_fits_the_chunks,
)
from ttlaunch.recipe.collective_traffic import (
    all_reduce_bytes,
    all_reduce_mean_traffic,
    averaging_traffic,
    distributed_data_parallel_traffic,
    process_group_traffic,
    ring_all_reduce_bytes,
    validation_traffic,
)
from ttlaunch.recipe.compression import (
    compressed_mean_traffic,
    compression_makes_sense,
    payload_bytes,
)
from ttlaunch.recipe.declare import (
    Flow,
    Layout,
    NeedsProcesses,
    Pattern,
    Per,
    Problem,
    Recipe,
    all_pairs,
    chain,
    ends,
    in_columns,
    in_rows,
    per,
)
from ttlaunch.recipe.local_steps import local_steps_have_no_loss_scale
from ttlaunch.recipe.replica_checks import every_replica_has_as_many_workers
from ttlaunch.recipe.sections import (
    CheckpointConfig,
    CompressionConfig,
    ConfigFile,
    DeviceConfig,
    LossScaleConfig,
    MultihostConfig,
    PipelineParallelConfig,
    SchedulerConfig,
    TrainingConfig,
    TrainingFile,
    TransformerConfig,
)
from ttlaunch.recipe.server_checks import servers_can_share_the_model
from ttlaunch.recipe.tensor_split import (
    devices_have_equal_shares,
    ranks_have_equal_shares,
    split_model_traffic,
    split_models_fit,
    split_norm_traffic,
)
from ttlaunch.recipe.traffic import (
    NUMBER_BYTES,
    VALUE_BYTES,
    Ranks,
    Traffic,
    agreed_buckets,
    agreed_scale,
    agreed_stop,
    sequences_of_blocks,
    shares,
    sums_of_blocks,
)

__all__ = [
    "NUMBER_BYTES",
    "VALUE_BYTES",
    "CheckpointConfig",
    "CompressionConfig",
    "ConfigFile",
    "DeviceConfig",
    "Flow",
    "Layout",
    "LossScaleConfig",
    "MultihostConfig",
    "NeedsProcesses",
    "Pattern",
    "Per",
    "PipelineParallelConfig",
    "Problem",
    "Ranks",
    "Recipe",
    "SchedulerConfig",
    "Section",
    "Traffic",
    "TrainingConfig",
    "TrainingFile",
    "TransformerConfig",
    "agreed_buckets",
    "agreed_scale",
    "agreed_stop",
    "aligned_subtrees",
    "all_pairs",
    "all_reduce_bytes",
    "all_reduce_mean_traffic",
    "averaging_traffic",
    "chain",
    "compressed_mean_traffic",
    "compression_makes_sense",
    "contiguous_blocks",
    "devices_have_equal_shares",
    "distributed_data_parallel_traffic",
    "ends",
    "every_replica_has_a_micro_batch",
    "every_replica_has_as_many_workers",
    "every_stage_has_a_block",
    "every_worker_has_a_micro_batch",
    "in_columns",
    "in_rows",
    "local_steps_have_no_loss_scale",
    "no_layer_needs_the_matrix_of_another",
    "num_workers_counts_the_stages",
    "payload_bytes",
    "per",
    "process_group_traffic",
    "ranks_have_equal_shares",
    "ring_all_reduce_bytes",
    "sequences_of_blocks",
    "servers_can_share_the_model",
    "shares",
    "split_model_traffic",
    "split_models_fit",
    "split_norm_traffic",
    "sums_of_blocks",
    "the_schedule_fits_the_chunks",
    "validation_traffic",
]
