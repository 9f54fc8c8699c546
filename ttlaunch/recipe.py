"""How a recipe declares itself, without torch: configuration, roles, who talks to whom.

A `recipe.py` imports only this module. The launcher reads it to check the configuration, lay the roles out and print
the plan; the rank reads it to validate the same configuration again.
"""

from ttlaunch.spec.located.schema import Section as Section
from ttlaunch.spec.recipe.bits import Bits as Bits
from ttlaunch.spec.recipe.bits import ReadOnlyWith as ReadOnlyWith
from ttlaunch.spec.recipe.blocks import aligned_subtrees as aligned_subtrees
from ttlaunch.spec.recipe.blocks import contiguous_blocks as contiguous_blocks
from ttlaunch.spec.recipe.checks import every_replica_has_a_micro_batch as every_replica_has_a_micro_batch
from ttlaunch.spec.recipe.checks import every_replica_has_as_many_workers as every_replica_has_as_many_workers
from ttlaunch.spec.recipe.checks import every_stage_has_a_block as every_stage_has_a_block
from ttlaunch.spec.recipe.checks import every_worker_has_a_micro_batch as every_worker_has_a_micro_batch
from ttlaunch.spec.recipe.checks import gradients_may_be_stale as gradients_may_be_stale
from ttlaunch.spec.recipe.checks import num_workers_counts_the_stages as num_workers_counts_the_stages
from ttlaunch.spec.recipe.checks import servers_can_share_the_model as servers_can_share_the_model
from ttlaunch.spec.recipe.checks import slow_workers_are_there as slow_workers_are_there
from ttlaunch.spec.recipe.checks import the_schedule_fits_the_chunks as the_schedule_fits_the_chunks
from ttlaunch.spec.recipe.collective_traffic import all_reduce_bytes as all_reduce_bytes
from ttlaunch.spec.recipe.collective_traffic import all_reduce_mean_traffic as all_reduce_mean_traffic
from ttlaunch.spec.recipe.collective_traffic import (
    distributed_data_parallel_traffic as distributed_data_parallel_traffic,
)
from ttlaunch.spec.recipe.collective_traffic import process_group_traffic as process_group_traffic
from ttlaunch.spec.recipe.collective_traffic import ring_all_reduce_bytes as ring_all_reduce_bytes
from ttlaunch.spec.recipe.collective_traffic import shadowed_traffic as shadowed_traffic
from ttlaunch.spec.recipe.collective_traffic import validation_traffic as validation_traffic
from ttlaunch.spec.recipe.compression import compressed_mean_traffic as compressed_mean_traffic
from ttlaunch.spec.recipe.compression import compression_makes_sense as compression_makes_sense
from ttlaunch.spec.recipe.compression import payload_bytes as payload_bytes
from ttlaunch.spec.recipe.compression import pushes_are_compressed as pushes_are_compressed
from ttlaunch.spec.recipe.declare import Audited as Audited
from ttlaunch.spec.recipe.declare import Elastic as Elastic
from ttlaunch.spec.recipe.declare import Flow as Flow
from ttlaunch.spec.recipe.declare import Layout as Layout
from ttlaunch.spec.recipe.declare import Naive as Naive
from ttlaunch.spec.recipe.declare import NeedsProcesses as NeedsProcesses
from ttlaunch.spec.recipe.declare import Pattern as Pattern
from ttlaunch.spec.recipe.declare import Per as Per
from ttlaunch.spec.recipe.declare import Problem as Problem
from ttlaunch.spec.recipe.declare import Recipe as Recipe
from ttlaunch.spec.recipe.declare import all_pairs as all_pairs
from ttlaunch.spec.recipe.declare import chain as chain
from ttlaunch.spec.recipe.declare import ends as ends
from ttlaunch.spec.recipe.declare import in_columns as in_columns
from ttlaunch.spec.recipe.declare import in_rows as in_rows
from ttlaunch.spec.recipe.declare import per as per
from ttlaunch.spec.recipe.local_steps import local_steps_have_no_loss_scale as local_steps_have_no_loss_scale
from ttlaunch.spec.recipe.local_steps import local_steps_traffic as local_steps_traffic
from ttlaunch.spec.recipe.local_steps import messages_of_several_steps_overtake as messages_of_several_steps_overtake
from ttlaunch.spec.recipe.sections import CheckpointConfig as CheckpointConfig
from ttlaunch.spec.recipe.sections import CompressionConfig as CompressionConfig
from ttlaunch.spec.recipe.sections import ConfigFile as ConfigFile
from ttlaunch.spec.recipe.sections import DataConfig as DataConfig
from ttlaunch.spec.recipe.sections import DeviceConfig as DeviceConfig
from ttlaunch.spec.recipe.sections import LossScaleConfig as LossScaleConfig
from ttlaunch.spec.recipe.sections import MultihostConfig as MultihostConfig
from ttlaunch.spec.recipe.sections import PipelineParallelConfig as PipelineParallelConfig
from ttlaunch.spec.recipe.sections import SchedulerConfig as SchedulerConfig
from ttlaunch.spec.recipe.sections import TrainingConfig as TrainingConfig
from ttlaunch.spec.recipe.sections import TrainingFile as TrainingFile
from ttlaunch.spec.recipe.sections import TransformerConfig as TransformerConfig
from ttlaunch.spec.recipe.serving import header_numbers as header_numbers
from ttlaunch.spec.recipe.serving import told_numbers as told_numbers
from ttlaunch.spec.recipe.tensor_split import devices_have_equal_shares as devices_have_equal_shares
from ttlaunch.spec.recipe.tensor_split import ranks_have_equal_shares as ranks_have_equal_shares
from ttlaunch.spec.recipe.tensor_split import split_model_traffic as split_model_traffic
from ttlaunch.spec.recipe.tensor_split import split_models_fit as split_models_fit
from ttlaunch.spec.recipe.tensor_split import split_norm_traffic as split_norm_traffic
from ttlaunch.spec.recipe.tensor_split import stages_have_equal_shares as stages_have_equal_shares
from ttlaunch.spec.recipe.traffic import NUMBER_BYTES as NUMBER_BYTES
from ttlaunch.spec.recipe.traffic import VALUE_BYTES as VALUE_BYTES
from ttlaunch.spec.recipe.traffic import Ranks as Ranks
from ttlaunch.spec.recipe.traffic import Traffic as Traffic
from ttlaunch.spec.recipe.traffic import agreed_buckets as agreed_buckets
from ttlaunch.spec.recipe.traffic import agreed_scale as agreed_scale
from ttlaunch.spec.recipe.traffic import agreed_stop as agreed_stop
from ttlaunch.spec.recipe.traffic import sequences_of_blocks as sequences_of_blocks
from ttlaunch.spec.recipe.traffic import shares as shares
from ttlaunch.spec.recipe.traffic import sums_of_blocks as sums_of_blocks
