"""Whatever is wrong with what was typed or written: the place, the rule and the repair, and nothing is started.

The words of each refusal are in `tests/golden/refusals/`, one transcript for each test.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import GOLDEN
from ttlaunch.diagnostics.explain import known_codes

RUN = "run hierarchical_parallel -c train.yaml"
PIPELINE = "run pipeline_parallel -c train.yaml"
SERVERS = "run sync_ps -c train.yaml"
PIPELINE_OF_FOUR = """\
transformer_config:
  num_blocks: 4
multihost_config:
  pipeline_parallel_config:
    blocks_per_rank: {blocks}
"""
RECIPE = """\
from ttlaunch.recipe import ConfigFile, Layout, Recipe

RECIPE = Recipe(summary="Nothing.", config=ConfigFile, layouts=[Layout("all", peer=None)], uses_data=False)
"""


# The training file.


def test_an_unknown_section_is_refused_once(refused):
    refused(RUN, files={"train.yaml": "trainning_config:\n  steps: 3\n"}, status=3)


def test_an_unknown_key_of_a_section_says_what_was_meant(refused):
    refused(RUN, files={"train.yaml": "training_config:\n  steps: 3\n  batchsize: 8\n"}, status=3)


def test_an_unknown_key_three_levels_deep_says_what_was_meant(refused):
    text = "multihost_config:\n  pipeline_parallel_config:\n    block_per_rank: [2, 2]\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_an_unknown_key_like_no_other_lists_the_known_ones(refused):
    refused(RUN, files={"train.yaml": "device_config:\n  qqq: 1\n"}, status=3)


def test_a_vector_that_no_memory_holds_is_refused(refused):
    refused("run fabric_minimal --dry-run --set all_reduce_config.megabytes=1e9", status=3)


def test_a_word_where_a_number_belongs_is_refused(refused):
    refused(RUN, files={"train.yaml": "training_config:\n  steps: many\n"}, status=3)


def test_a_quoted_number_is_not_a_number(refused):
    refused(RUN, files={"train.yaml": 'training_config:\n  batch_size: "16"\n'}, status=3)


def test_a_fraction_of_a_worker_is_refused(refused):
    refused(RUN, files={"train.yaml": "multihost_config:\n  num_workers: 1.5\n"}, status=3)


def test_a_list_where_a_section_belongs_is_refused(refused):
    refused(RUN, files={"train.yaml": "training_config: [1, 2]\n"}, status=3)


def test_a_training_file_that_is_a_list_is_refused(refused):
    refused(RUN, files={"train.yaml": "- training_config\n"}, status=3)


def test_no_workers_at_all_is_out_of_range(refused):
    refused(RUN, files={"train.yaml": "multihost_config:\n  num_workers: 0\n"}, status=3)


def test_a_probability_of_one_is_out_of_range(refused):
    refused(RUN, files={"train.yaml": "transformer_config:\n  dropout_prob: 1.0\n"}, status=3)


def test_an_unknown_choice_says_what_was_meant(refused):
    refused(RUN, files={"train.yaml": "training_config:\n  optimizer: adam\n"}, status=3)


def test_malformed_yaml_is_shown_at_its_place(refused):
    refused(RUN, files={"train.yaml": "training_config:\n  steps: [3\nmultihost_config: {}\n"}, status=3)


def test_a_tab_as_indentation_is_shown_at_its_place(refused):
    refused(RUN, files={"train.yaml": "training_config:\n\tsteps: 3\n"}, status=3)


def test_a_key_given_twice_is_refused(refused):
    refused(RUN, files={"train.yaml": "training_config:\n  steps: 3\n  steps: 4\n"}, status=3)


def test_a_missing_training_file_is_refused(refused):
    refused(RUN, status=2)


def test_a_folder_as_training_file_is_refused(refused):
    refused(RUN, files={"train.yaml/inside": ""}, status=2)


def test_an_empty_training_file_is_refused(refused):
    refused(RUN, files={"train.yaml": ""}, status=3)


def test_an_empty_standard_input_is_refused(refused):
    refused("run hierarchical_parallel -c -", stdin=b"", status=3)


def test_windows_line_ends_do_not_hide_a_mistake(refused):
    refused(RUN, files={"train.yaml": "training_config:\r\n  step: 3\r\n"}, status=3)


def test_a_byte_order_mark_does_not_hide_a_mistake(refused):
    refused(RUN, files={"train.yaml": "\ufefftraining_config:\n  step: 3\n"}, status=3)


def test_a_binary_training_file_is_refused(refused):
    refused(RUN, files={"train.yaml": b"\x7fELF\x00\xff\xfe\x00"}, status=3)


def test_heads_that_do_not_divide_the_embedding_are_refused(refused):
    text = "transformer_config:\n  embedding_dim: 64\n  num_heads: 5\n"
    refused(RUN, files={"train.yaml": text}, status=3)


def test_fewer_micro_batches_than_workers_are_refused(refused):
    text = "training_config:\n  batch_size: 4\n  micro_batch_size: 2\nmultihost_config:\n  num_workers: 3\n"
    refused(RUN, files={"train.yaml": text}, status=3)


def test_more_workers_than_sequences_are_refused_with_a_hint_that_suffices(refused, ttlaunch):
    workers = (
        "plan data_parallel --set multihost_config.num_workers=20 --set training_config.gradient_accumulation_steps=3"
    )
    refused(f"{workers} --set training_config.batch_size=4", status=3)
    assert (
        0 == ttlaunch(f"{workers} --set training_config.batch_size=7 --set training_config.micro_batch_size=1").status
    )


def test_a_micro_batch_larger_than_the_step_is_refused(refused):
    text = "training_config:\n  batch_size: 4\n  micro_batch_size: 8\nmultihost_config:\n  num_workers: 1\n"
    refused(RUN, files={"train.yaml": text}, status=3)


def test_a_loss_scale_above_its_bound_is_refused(refused):
    text = "training_config: {precision: fp16}\nloss_scale_config:\n  initial_power: 8\n  max_power: 4\n"
    refused(RUN, files={"train.yaml": text}, status=3)


def test_one_template_without_the_other_is_refused(refused):
    text = 'training_config:\n  response_template: "### Response:"\nmultihost_config:\n  num_workers: 1\n'
    refused(RUN, files={"train.yaml": text}, status=3)


def test_a_text_with_a_colon_is_to_be_quoted(refused):
    files = {"train.yaml": "training_config:\n  instruction_template:\n    USER: x\n"}
    refused(f"{RUN} --set training_config.response_template=BOT:", files=files, status=3)


def test_a_text_quoted_as_the_hint_says_is_taken(ttlaunch):
    line = "plan hierarchical_parallel --format json --set training_config.response_template=BOT:"
    (diagnostic,) = json.loads(ttlaunch(line).stdout)["diagnostics"]
    hint = shlex.split(diagnostic["hints"][0].split("`")[1])
    other = ["--set", 'training_config.instruction_template="USER:"']
    (mistake,) = json.loads(ttlaunch([*line.split()[:-2], *hint, *other]).stdout)["diagnostics"]
    assert "C031" == mistake["code"]  # both were read, and the text has none


def test_a_text_without_a_response_is_refused(refused):
    text = "training_config:\n  data_path: book.txt\n  response_template: '[A]'\n  instruction_template: '[Q]'\n"
    refused(RUN, files={"train.yaml": text, "book.txt": "Call me Ishmael. " * 100}, status=3)


def test_blocks_per_rank_that_do_not_add_up_are_refused(refused):
    refused(PIPELINE, files={"train.yaml": PIPELINE_OF_FOUR.format(blocks="[1, 2]")}, status=3)


def test_a_stage_without_blocks_is_refused(refused):
    refused(PIPELINE, files={"train.yaml": PIPELINE_OF_FOUR.format(blocks="[4, 0]")}, status=3)


def test_two_numbers_of_blocks_that_differ_are_refused(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "    num_blocks: 6\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_stages_with_a_gap_are_refused(refused):
    refused(PIPELINE, files={"train.yaml": PIPELINE_OF_FOUR.format(blocks="{0: 2, 2: 2}")}, status=3)


def test_a_pipeline_without_stages_is_refused(refused):
    refused(PIPELINE, files={"train.yaml": "training_config:\n  steps: 3\n"}, status=3)


def test_more_workers_than_stages_are_refused(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "  num_workers: 3\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_more_workers_than_stages_of_all_replicas_are_refused(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "    replicas: 2\n  num_workers: 2\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_interleaving_one_chunk_is_refused(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "    schedule: interleaved\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_chunks_that_the_schedule_does_not_use_are_refused(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "    schedule: gpipe\n    chunks_per_rank: 2\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_blocks_that_chunks_cannot_share_are_refused(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[1, 3]") + "    schedule: auto\n    chunks_per_rank: 2\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_an_unknown_schedule_names_the_known_ones(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "    schedule: zero_bubble\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_more_replicas_than_micro_batches_are_refused(refused):
    text = "training_config:\n  batch_size: 2\n" + PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "    replicas: 3\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_ranks_that_cannot_share_the_heads_are_refused(refused):
    refused(
        "run tensor_parallel -c train.yaml", files={"train.yaml": "tensor_parallel_config:\n  ranks: 3\n"}, status=3
    )


def test_ranks_that_cannot_share_a_feed_forward_layer_are_refused(refused):
    text = "training_config:\n  model_type: mlp\ntransformer_config:\n  embedding_dim: 10\n  num_heads: 5\ntensor_parallel_config:\n  ranks: 3\n"
    refused("run tensor_parallel -c train.yaml", files={"train.yaml": text}, status=3)


def test_a_world_that_is_no_whole_number_of_models_is_refused(refused):
    refused(
        "run tensor_parallel -c train.yaml --ranks 3",
        files={"train.yaml": "tensor_parallel_config:\n  ranks: 2\n"},
        status=3,
    )


def test_more_servers_than_layers_are_refused(refused):
    text = "transformer_config:\n  num_blocks: 2\nsync_ps_config:\n  num_servers: 5\n"
    refused(SERVERS, files={"train.yaml": text}, status=3)


def test_loss_scaling_with_stale_gradients_is_refused(refused):
    refused("run elastic_dp -c train.yaml", files={"train.yaml": "training_config:\n  precision: fp16\n"}, status=3)


def test_early_stopping_where_nobody_waits_is_refused(refused):
    text = "training_config:\n  early_stop_patience: 3\n"
    refused("run elastic_dp -c train.yaml", files={"train.yaml": text}, status=3)


def test_tensor_parallelism_that_no_recipe_does_is_refused(refused):
    refused("run data_parallel -c train.yaml", files={"train.yaml": "device_config:\n  enable_tp: true\n"}, status=3)


def test_ranks_of_a_stage_that_cannot_share_the_heads_are_refused(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "    ranks_per_stage: 3\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_fewer_workers_than_ranks_of_all_stages_are_refused(refused):
    text = PIPELINE_OF_FOUR.format(blocks="[2, 2]") + "    ranks_per_stage: 2\n  num_workers: 2\n"
    refused(PIPELINE, files={"train.yaml": text}, status=3)


def test_devices_that_cannot_share_the_heads_are_refused(refused):
    text = "device_config:\n  enable_tp: true\n  mesh_shape: [1, 3]\n"
    refused(RUN, files={"train.yaml": text}, status=3)


def test_a_world_that_is_too_small_for_the_devices_of_workers_is_refused(refused):
    text = "device_config:\n  enable_tp: true\n  mesh_shape: [1, 2]\n"
    refused(f"{RUN} --ranks 4 --set multihost_config.num_workers=2", files={"train.yaml": text}, status=3)


def test_a_key_that_the_recipe_does_not_read_is_refused(refused):
    text = "multihost_config:\n  pipeline_parallel_config: {blocks_per_rank: [2, 2]}\n"
    refused(RUN, files={"train.yaml": text}, status=3)


DATA_PARALLEL = "plan data_parallel -c train.yaml"


def test_a_zero_stage_that_nobody_knows_is_refused(refused):
    refused("run zero -c train.yaml", files={"train.yaml": "zero_config:\n  stage: 4\n"}, status=3)


CONV = "training_config:\n  model_type: conv\n"


def test_images_of_another_size_are_refused(refused):
    refused(DATA_PARALLEL, files={"train.yaml": CONV + "transformer_config:\n  max_sequence_length: 784\n"}, status=3)


def test_a_file_that_has_no_images_is_refused(refused):
    text = CONV + "  data_path: images.csv\n"
    refused(DATA_PARALLEL, files={"train.yaml": text, "images.csv": "pixels,label\n"}, status=3)


def test_keys_about_text_are_refused_for_images(refused):
    text = CONV + "  tokenizer_type: char\ntransformer_config:\n  tie_embeddings: true\n"
    refused(DATA_PARALLEL, files={"train.yaml": text}, status=3)


def test_bounds_of_stretched_positions_in_the_wrong_order_are_refused(refused):
    text = "training_config:\n  model_type: llama\ntransformer_config:\n  rope_scaling:\n    low_freq_factor: 4\n"
    refused(DATA_PARALLEL, files={"train.yaml": text}, status=3)


def test_drawn_data_that_cannot_be_and_keys_about_a_file_are_refused(refused):
    text = "data_config: {source: markov, vocabulary: 4, branching: 9}\ntraining_config:\n  data_path: book.txt\n"
    refused(DATA_PARALLEL, files={"train.yaml": text}, status=3)


def test_convolutions_that_ranks_cannot_share_are_refused(refused):
    text = CONV + "tensor_parallel_config:\n  ranks: 3\n"
    refused("run tensor_parallel -c train.yaml", files={"train.yaml": text}, status=3)


def test_a_text_is_no_file_of_tokens(refused):
    text = "training_config:\n  tokenizer_type: ids\n  data_path: book.txt\n"
    refused(DATA_PARALLEL, files={"train.yaml": text, "book.txt": "once upon a time\n"}, status=3)


def test_digits_that_are_not_installed_are_refused_with_the_command_that_installs_them(other_machine, here, golden):
    (here / "train.yaml").write_text(CONV)
    answer = other_machine("plan data_parallel -c train.yaml", hidden=("sklearn",))
    assert (3, "") == (answer.status, answer.stdout)
    golden("refusals/digits_that_are_not_installed_are_refused.txt", answer.stderr)


def test_compression_of_what_torch_sends_is_refused(refused):
    text = "data_parallel_config:\n  reduction: fast\ncompression_config:\n  kind: int8\n"
    refused(DATA_PARALLEL, files={"train.yaml": text}, status=3)


def test_a_kind_of_compression_that_nobody_knows_is_refused(refused):
    refused(DATA_PARALLEL, files={"train.yaml": "compression_config:\n  kind: int4\n"}, status=3)


# The training text.


def test_a_missing_text_is_refused(refused):
    refused(RUN, files={"train.yaml": "training_config:\n  data_path: book.txt\n"}, status=3)


def test_an_empty_text_is_refused(refused):
    refused(RUN, files={"train.yaml": "training_config:\n  data_path: book.txt\n", "book.txt": ""}, status=3)


def test_a_binary_text_is_refused(refused):
    text = b"plain\n\xff\xfe\x00\x01"
    refused(RUN, files={"train.yaml": "training_config:\n  data_path: book.txt\n", "book.txt": text}, status=3)


def test_a_text_shorter_than_one_sequence_is_refused(refused):
    files = {"train.yaml": "training_config:\n  data_path: book.txt\n", "book.txt": "It was a dark night.\n"}
    refused(RUN, files=files, status=3)


def test_a_text_that_cannot_be_read_is_refused(refused):
    text = "training_config:\n  data_path: /proc/self/mem\n"  # has no first byte, not even for root
    refused(RUN, files={"train.yaml": text}, status=3)


def test_a_text_behind_a_loop_of_links_is_refused(here, refused):
    (here / "book.txt").symlink_to("book.txt")
    refused(RUN, files={"train.yaml": "training_config:\n  data_path: book.txt\n"}, status=3)


@pytest.mark.parametrize("path", ["~nobody-here/book.txt", '"a\\0b"', "x" * 300], ids=["home", "zero-byte", "long"])
def test_a_text_at_an_impossible_path_is_refused(refused, path):
    refused(RUN, files={"train.yaml": f"training_config:\n  data_path: {path}\n"}, status=3)


def test_a_missing_text_named_on_the_command_line_points_there(refused):
    refused("run hierarchical_parallel --set training_config.data_path=book.txt", status=3)


# `--set`.


def test_set_without_an_equals_sign_is_refused(refused):
    refused("run hierarchical_parallel --set training_config.steps", status=2)


def test_set_of_a_key_without_its_section_is_refused(refused):
    refused("run hierarchical_parallel --set steps=3", status=3)


def test_set_of_an_unknown_key_says_what_was_meant(refused):
    refused("run hierarchical_parallel --set training_config.stepps=3", status=3)


def test_set_of_a_wrong_type_is_refused(refused):
    refused("run hierarchical_parallel --set training_config.steps=few", status=3)


def test_set_of_a_value_that_is_no_yaml_is_refused(refused):
    refused(["run", "hierarchical_parallel", "--set", "training_config.steps=[3"], status=2)


# Recipes.


def test_an_unknown_recipe_says_what_was_meant(refused):
    refused("run hierarchical_paralel", status=2)


def test_an_unknown_recipe_like_no_other_lists_the_known_ones(refused):
    refused("run zzz", status=2)


@pytest.mark.parametrize("name", ["~nobody-here", "x" * 300], ids=["home", "long"])
def test_an_impossible_path_is_no_recipe(refused, name):
    refused(["run", name], status=2)


def test_a_folder_without_a_recipe_is_refused(refused):
    refused("run mine", files={"mine/notes.txt": ""}, status=2)


def test_a_recipe_with_a_syntax_error_is_shown_at_its_place(refused):
    refused("run mine", files={"mine/recipe.py": "RECIPE = (\n", "mine/trainer.py": ""}, status=3)


def test_a_recipe_that_raises_is_shown_at_its_line(refused):
    text = "import math\n\nHALF = math.sqrt(-1)\n"
    refused("run mine", files={"mine/recipe.py": text, "mine/trainer.py": ""}, status=3)


def test_a_recipe_that_exits_is_shown_at_its_line(refused):
    text = "import sys\n\nsys.exit(0)\n"
    refused("run mine", files={"mine/recipe.py": text, "mine/trainer.py": ""}, status=3)


def test_a_recipe_that_declares_nothing_is_refused(refused):
    refused("run mine", files={"mine/recipe.py": "recipe = 1\n", "mine/trainer.py": ""}, status=3)


def test_a_recipe_without_a_trainer_is_refused(refused):
    refused("run mine", files={"mine/recipe.py": RECIPE}, status=3)


def test_a_recipe_with_an_impossible_declaration_is_shown_at_its_line(refused):
    text = RECIPE.replace("peer=None", "peer=None, other=None")
    refused("run mine", files={"mine/recipe.py": text, "mine/trainer.py": ""}, status=3)


def test_a_trainer_with_a_syntax_error_is_shown_at_its_place(refused):
    refused("run mine", files={"mine/recipe.py": RECIPE, "mine/trainer.py": "def peer(cfg, ctx)\n    pass\n"}, status=3)


def test_a_trainer_without_a_function_for_a_role_is_refused(refused):
    files = {"mine/recipe.py": RECIPE, "mine/trainer.py": "def pear(cfg, ctx):\n    pass\n"}
    refused("run mine", files=files, status=3)


def test_a_named_pipe_is_no_training_file(refused, here):
    os.mkfifo(here / "train.yaml")
    refused("run fabric_minimal -c train.yaml", status=2)


def test_words_after_a_recipe_are_refused(refused):
    refused("run fabric_minimal -- extra", status=2)


def test_a_size_that_no_machine_could_work_through_is_refused(refused):
    refused("run hierarchical_parallel --set training_config.batch_size=100000000000", status=3)


def test_a_missing_script_is_refused(refused):
    refused("run train.py", status=2)


def test_a_script_takes_no_training_file(refused):
    refused("run work.py -c train.yaml --set a=b", files={"work.py": "", "train.yaml": ""}, status=2)


# Worlds.


def test_a_world_of_the_wrong_size_names_the_right_ones(refused):
    refused(f"{RUN} --ranks 6", files={"train.yaml": "multihost_config:\n  num_workers: 2\n"}, status=3)


def test_several_ranks_without_multihost_say_why_not(refused):
    refused("run hierarchical_parallel --ranks 4 --set multihost_config.enabled=false", status=3)


def test_more_ranks_than_slots_are_refused(refused):
    files = {"small/hosts.txt": "localhost slots=2\n", "train.yaml": "multihost_config:\n  num_workers: 3\n"}
    refused(f"{RUN} --on small", files=files, status=3)


def test_more_ranks_of_a_script_than_slots_are_refused(refused):
    refused("run work.py -n 3 --on small", files={"small/hosts.txt": "localhost slots=2\n", "work.py": ""}, status=3)


def test_ranks_against_the_bindings_are_refused(refused):
    refused("run hierarchical_parallel --on 5loudboxes --ranks 4", status=2)


def test_ranks_of_a_script_against_the_bindings_are_refused(refused):
    refused("run work.py --on 5loudboxes --ranks 4", files={"work.py": ""}, status=2)


def test_bindings_for_a_world_that_the_roles_do_not_need_are_refused(refused):
    files = {"train.yaml": "multihost_config:\n  num_workers: 2\n"}
    refused(f"{RUN} --on 5loudboxes", files=files, status=3)


def test_fabric_sockets_without_links_are_refused(refused):
    refused("run fabric_minimal --set multihost_config.socket_type=fabric", status=3)


def test_a_simulation_of_torchs_own_reduction_is_refused(refused):
    refused("simulate data_parallel --set data_parallel_config.reduction=fast", status=3)


def test_a_simulation_of_workers_that_share_torchs_group_is_refused(refused):
    text = "multihost_config:\n  enabled: true\n"
    refused("simulate fully_sharded -c train.yaml", files={"train.yaml": text}, status=3)


def test_workers_that_replicas_cannot_share_are_refused(refused):
    text = "multihost_config:\n  num_workers: 3\nfully_sharded_config:\n  replicas: 2\n"
    refused("run fully_sharded -c train.yaml", files={"train.yaml": text}, status=3)


def test_a_simulation_of_what_a_recipe_says_needs_processes_is_refused(refused):
    recipe = """\
from ttlaunch.recipe import ConfigFile, Layout, NeedsProcesses, Recipe, Section
class Pool(Section):
    kind: str = "forked"
class Config(ConfigFile):
    pool: Pool = Pool()
needs = [NeedsProcesses("pool.kind", "forked", "shared", "forks each rank")]
RECIPE = Recipe("A test.", Config, [Layout("all", peer=None)], uses_data=False, needs_processes=needs)
"""
    files = {"mine/recipe.py": recipe, "mine/trainer.py": "def peer(cfg, ctx):\n    pass\n"}
    refused("simulate ./mine --ranks 2", files=files, status=3)


def test_one_rank_needs_no_further_process(ttlaunch):
    sizes = ("num_blocks=1", "num_heads=1", "embedding_dim=8", "max_sequence_length=8")
    small = "".join(f" --set transformer_config.{size}" for size in sizes)
    fast = "--set data_parallel_config.reduction=fast --set training_config.steps=1"
    assert 0 == ttlaunch(f"simulate data_parallel --ranks 1 {fast}{small}").status


def test_a_mesh_shape_with_other_devices_than_the_mesh_is_refused(refused):
    line = "run fabric_minimal --on 2loudboxes --set device_config.mesh_shape=[2,8]"
    refused(line, status=3)


def test_an_unknown_configuration_says_what_was_meant(refused):
    refused("run hierarchical_parallel --on 5loudboxs", status=2)


def test_a_missing_hostfile_is_an_error(refused):
    refused("run hierarchical_parallel --hostfile hosts.txt", status=2)


def test_mistakes_in_topology_and_training_file_are_shown_together(refused):
    files = {
        "lab/hosts.txt": "box-01 slots=1\nbox-02 slot=1\n",
        "train.yaml": "training_config:\n  step: 3\n  batch_size: -1\n",
    }
    refused(f"{RUN} --on lab", files=files, status=3)


# New configurations.


def test_a_configuration_is_never_written_over(refused):
    refused("init lab --hosts a,b", files={"configurations/lab/hosts.txt": "a slots=1\n"}, status=2)


@pytest.mark.parametrize(
    "hosts",
    ["a,,b", "a:0", "a:two", "a b", "a,a", ""],
    ids=["empty-name", "no-slots", "word-for-slots", "space", "twice", "nothing"],
)
def test_a_bad_host_list_is_refused(refused, hosts):
    refused(["init", "lab", "--hosts", hosts], status=2)


def test_a_bad_device_shape_is_refused(refused):
    refused("init lab --hosts a --device-shape 8", status=2)


def test_an_unknown_architecture_is_refused(refused):
    refused("init lab --hosts a --arch wormhole_b", status=2)


def test_a_path_is_no_name_for_a_configuration(refused):
    refused("init ../lab --hosts a", status=2)


def test_a_configuration_where_none_can_be_written_is_refused(refused):
    refused("init lab --hosts a --out taken", files={"taken": ""}, status=2)


def test_a_configuration_that_cannot_be_written_is_json_too(ttlaunch, here):
    (here / "taken").touch()
    for line, code in (("init lab --hosts a --out taken", "P032"), ("init lab --hosts a:0", "T014")):
        answer = ttlaunch(f"{line} --format json")
        assert (2, "", [code]) == (
            answer.status,
            answer.stderr,
            [diagnostic["code"] for diagnostic in json.loads(answer.stdout)["diagnostics"]],
        )


# Every check of a configuration.


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("C009", b"\xef\xbb\xbftraining_config:\n  steps: 10\n"),
        ("C010", b"training_config:\r\n  steps: 10\r\n"),
        ("C020", b"device_config: {enable_ddp: true}\n"),
        ("C028", b"training_config: {learning_rate: 5.0e3}\n"),
        ("C032", b"training_config: {steps: 50}\nscheduler_config: {type: cosine, warmup_steps: 10, hold_steps: 40}\n"),
    ],
)
def test_what_may_be_meant_is_a_note_or_a_warning(ttlaunch, here, golden, code, text):
    (here / "train.yaml").write_bytes(text)
    answer = ttlaunch("plan hierarchical_parallel -c train.yaml --verbose")
    assert 0 == answer.status
    golden(f"warnings/{code}.txt", answer.stderr)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("C086", b"compression_config: {kind: top_k, error_feedback: false}\n"),
        ("C087", b"multihost_config: {num_workers: 8}\ncompression_config: {kind: int8}\n"),
    ],
)
def test_compression_that_does_no_good_is_a_warning(ttlaunch, here, golden, code, text):
    (here / "train.yaml").write_bytes(text)
    answer = ttlaunch("plan data_parallel -c train.yaml --verbose")
    golden(f"warnings/{code}.txt", answer.stderr)


def test_a_secret_that_the_shell_lacks_is_refused(refused):
    text = 'training_config: {data_path: "env:DATA_THAT_NOBODY_SET"}\n'
    refused(RUN, files={"train.yaml": text}, status=3)


def test_every_check_of_a_configuration_has_a_snapshot_of_its_message():
    """E10: no C code without a transcript that shows its words and its place, compared letter by letter above."""
    texts = [path.read_text() for folder in ("refusals", "warnings") for path in (GOLDEN / folder).glob("*.txt")]
    shown = {code for text in texts for code in re.findall(r"^(?:error|warning|note)\[(C\d{3})\]", text, re.MULTILINE)}
    assert {code for code in known_codes() if code.startswith("C")} == shown


# This machine.


@pytest.fixture
def other_machine(here, bare_python, tmp_path_factory):
    """`other_machine(line)` runs ttlaunch under a Python that has no mpirun beside it, with a PATH of one folder."""
    programs = tmp_path_factory.mktemp("programs")

    def invoke(line, *, mpirun=None, hidden=()):
        python, environment = bare_python(hidden=hidden)
        if mpirun is not None:
            (programs / "mpirun").write_text(mpirun)
            (programs / "mpirun").chmod(0o755)
        process = subprocess.run(
            [python, "-m", "ttlaunch", *line.split()],
            env={**environment, "PATH": str(programs)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = process.stderr.replace(str(python), "ELSEWHERE/bin/python").replace(str(programs), "PROGRAMS")
        return SimpleNamespace(status=process.returncode, stdout=process.stdout, stderr=said)

    return invoke


def test_a_machine_without_mpirun_is_refused(refused, other_machine):
    line = "run hierarchical_parallel"
    refused(line, answer=other_machine(line), status=4)


def test_an_mpirun_of_mpich_is_refused(refused, other_machine):
    line = "run hierarchical_parallel"
    mpich = "#!/bin/sh\necho 'HYDRA build details:'\necho '    Version:                                 4.2.1'\n"
    refused(line, answer=other_machine(line, mpirun=mpich), status=4)


def test_an_mpirun_older_than_4_1_is_refused(refused, other_machine):
    line = "run hierarchical_parallel"
    old = "#!/bin/sh\necho 'mpirun (Open MPI) 3.1.6'\n"
    refused(line, answer=other_machine(line, mpirun=old), status=4)


def test_an_mpirun_that_cannot_be_executed_is_refused(refused, other_machine):
    line = "run hierarchical_parallel"
    refused(line, answer=other_machine(line, mpirun="#!/no/such/interpreter\n"), status=4)


def test_a_python_without_the_packages_of_a_rank_is_refused(refused, other_machine):
    line = "run fabric_minimal"
    mpirun = "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n"
    refused(line, answer=other_machine(line, mpirun=mpirun, hidden=["torch", "numpy"]), status=4)


def test_a_missing_mpirun_is_one_of_several_mistakes(refused, other_machine):
    line = "run hierarchical_parallel --set training_config.steps=few"
    refused(line, answer=other_machine(line), status=3)


def test_an_mpi4py_of_another_mpi_is_refused(refused, tmp_path_factory, monkeypatch):
    packages = tmp_path_factory.mktemp("packages")
    (packages / "mpi4py").mkdir()
    (packages / "mpi4py/__init__.py").touch()
    text = 'def Get_library_version():\n    return "MPICH Version:      4.2.1\\nMPICH Release date: …"\n'
    (packages / "mpi4py/MPI.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    refused("run hierarchical_parallel", status=4)


def test_an_mpi4py_without_a_library_is_refused(refused, tmp_path_factory, monkeypatch):
    packages = tmp_path_factory.mktemp("packages")
    (packages / "mpi4py").mkdir()
    (packages / "mpi4py/__init__.py").touch()
    (packages / "mpi4py/MPI.py").write_text('raise RuntimeError("cannot load MPI library")\n')
    monkeypatch.setenv("PYTHONPATH", str(packages))
    refused("run hierarchical_parallel", status=4)


def test_a_run_folder_that_cannot_be_made_is_one_line(here):
    (here / "taken").touch()
    process = subprocess.run(
        [sys.executable, "-m", "ttlaunch", "run", "fabric_minimal", "--runs-dir", "taken"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.stderr == (
        "error[H008]: the run folder cannot be made: taken: file exists\n\n"
        "hint: `--runs-dir DIR` makes run folders somewhere else\n\n"
    )
    assert (process.returncode, process.stdout) == (4, "")


# The other formats.


@pytest.mark.parametrize("command", ["run hierarchical_parallel", "plan hierarchical_parallel", "validate local"])
def test_concise_is_one_line_for_each_mistake(ttlaunch, command):
    recipe = "--recipe hierarchical_parallel" if command.startswith("validate") else ""
    sets = "--set training_config.steps=few --set training_config.bach_size=3"
    answer = ttlaunch(f"{command} {recipe} {sets} --format concise")
    assert answer.stderr == (
        "--set:1:17: error[C004]: unknown key `bach_size` in `training_config`\n"
        "--set:1:23: error[C005]: `steps` is `few`; a whole number was expected\n"
    )
    assert (answer.status, answer.stdout) == (3, "")


@pytest.mark.parametrize("command", ["run hierarchical_parallel", "plan hierarchical_parallel", "validate local"])
def test_json_is_all_there_is_on_stdout(ttlaunch, command):
    recipe = "--recipe hierarchical_parallel" if command.startswith("validate") else ""
    answer = ttlaunch(f"{command} {recipe} --set training_config.steps=few --format json")
    diagnostics = json.loads(answer.stdout)["diagnostics"]
    assert [(d["code"], d["severity"], d["primary"]["file"], d["primary"]["column"]) for d in diagnostics] == [
        ("C005", "error", "--set", 23)
    ]
    assert (answer.status, answer.stderr) == (3, "")
