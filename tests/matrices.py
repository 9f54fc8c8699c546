"""Tests that repeat one claim over many recipes, layouts or ways to break, and the cells of each that every run has.

The others are left out unless `--every-cell` is given or a cell is named; `benchmarks/matrices.py` runs them all. A claim
stays in every run with the cells that are likeliest to break it, or where the same code is run in one process:
`tests/runtime` has every layout, `ttlaunch parity` all of them over real ranks.
"""

import pytest

COLLECTED = pytest.StashKey[list[str]]()
"""In pytest's configuration: the name of every test that it collected, also of those that it leaves out."""

KEPT = {
    "agent/test_warm_start.py::test_a_forked_rank_that_fails_is_reported_as_any_other": ["exception", "left"],
    "cli/test_simulate.py::test_a_simulated_recipe_has_the_bits_of_a_run": ["pipeline"],
    # Forked ranks are added in `running/test_added_ranks.py`, by the same process that starts ranks on a host.
    "cluster/test_added_ranks_over_hosts.py::test_ranks_are_added_on_a_host_whose_first_rank_has_ended": ["False"],
    "cluster/test_chaos.py::test_a_fault_on_a_host_is_named_and_nothing_is_left_on_any": ["cut host=node1 at 1s"],
    "cluster/test_elastic_over_hosts.py::test_a_worker_of_a_machine_outside_the_cluster_joins_workers_on_hosts_and_changes_no_bit": [
        "2"
    ],
    # The others need packages that `benchmarks/frameworks.py` fetches.
    "cluster/test_frameworks.py::test_a_script_has_the_losses_of_torchrun_here_and_over_two_hosts": [
        "fsdp2",
        "lightning_trainer",
    ],
    "cluster/test_grpc_over_hosts.py::test_a_recipe_over_hosts_has_the_bits_of_one_machine": ["zero --ranks 4"],
    "cluster/test_hostile_host.py::test_a_host_that_lies_over_ssh_ends_the_run_in_its_name_and_takes_nothing_from_the_others": [
        "a gap of terabytes"
    ],
    "cluster/test_hostile_host.py::test_a_host_that_reports_an_end_of_its_ranks_that_they_have_not_come_to_is_named_and_they_are_ended": [
        "thousands of times"
    ],
    "cluster/test_listening.py::test_of_a_script_only_its_ranks_listen_and_on_the_chosen_network_alone": ["warm"],
    "cluster/test_run.py::test_recipes_run_across_four_hosts": ["fully_sharded-settings1"],
    "cluster/test_run.py::test_the_report_says_what_of_the_start_over_hosts_took_how_long": [
        "--warm --env OMP_NUM_THREADS=1 "
    ],
    "cluster/test_run_faults.py::test_a_host_that_loses_power_is_named": ["agents"],
    "cluster/test_run_faults.py::test_a_killed_process_is_named_with_its_host": ["rank-agents", "shim-openmpi"],
    "cluster/test_run_faults.py::test_a_rank_that_closes_its_connections_first_is_named_with_its_host": [
        "os._exit(0)-R005"
    ],
    "cluster/test_run_faults.py::test_a_removed_folder_of_a_run_on_a_host_is_named_with_who_needed_it": [
        ".ttlaunch/runs-the run's folder"
    ],
    "cluster/test_run_faults.py::test_a_run_whose_daemon_on_a_host_was_killed_has_failed": ["openmpi"],
    "cluster/test_run_faults.py::test_a_signal_ends_the_run_on_every_host": ["15-agents", "2-openmpi"],
    "cluster/test_run_faults.py::test_what_a_killed_agent_left_is_ended_and_removed": ["warm"],
    "cluster/test_slurm_security.py::test_a_host_whose_steps_lie_ends_the_run_in_its_name_and_takes_nothing_from_the_others": [
        "a gap of terabytes"
    ],
    # A status and a signal for every engine, the others for those that most runs have.
    "engines/test_conformance.py::test_a_rank_that_exits_is_named_and_the_others_are_ended": [
        "agents-3",
        "bash-3",
        "mpich-3",
        "open-mpi-4-3",
        "open-mpi-5-255",
    ],
    "engines/test_conformance.py::test_a_signal_to_the_launcher_lets_ranks_end_in_their_own_way": [
        "agents-15-143",
        "bash-2-130",
        "mpich-15-143",
        "open-mpi-4-2-130",
        "open-mpi-5-2-130",
    ],
    "engines/test_pairing.py::test_a_recipe_has_the_same_bits_under_both_engines": ["3"],
    "engines/test_recipes_over_grpc.py::test_a_recipe_has_the_bits_and_the_bytes_that_it_has_over_mpi": [
        "hierarchical_parallel",
        "zero --ranks 3",
    ],
    "hosts/sync/test_rules_as_git_reads_them.py::test_git_and_ttlaunch_copy_the_same_files_for_random_rules_and_trees": [
        "40 sets"
    ],
    "lab/test_replay.py::test_a_step_computed_again_has_the_digests_of_the_run": [
        "data_parallel with a codec",
        "diloco",
        "hierarchical_parallel",
        "pipeline_parallel",
        "zero, stage 3",
    ],
    "mpi/test_data_parallel.py::test_workers_equal_one_process": ["4"],
    "mpi/test_drift.py::test_local_steps_have_the_bits_of_a_simulation": ["diloco"],
    "mpi/test_drift.py::test_workers_that_lead_end_with_equal_weights": ["synchronous"],
    "mpi/test_frameworks.py::test_a_rank_that_raises_inside_a_framework_is_named_with_the_line_of_its_script": [
        'accelerated-accelerate-raise ValueError("a sample is not a number")',
        "fsdp2-torch-return x + self.down(torch.relu(self.up(x)))",
    ],
    "mpi/test_frameworks.py::test_a_script_goes_on_from_its_own_checkpoint_after_a_restart": ["ddp"],
    "mpi/test_fully_sharded.py::test_it_moves_and_keeps_what_the_formulas_say": ["4-{'shard': 'all', 'replicas': 2}"],
    "mpi/test_fully_sharded.py::test_pieces_of_a_checkpoint_join_to_the_weights_that_the_ranks_had": ["4-options1"],
    "mpi/test_fully_sharded.py::test_the_losses_are_those_of_one_process": ["4-{'shard': 'all', 'replicas': 2}"],
    "mpi/test_hydra.py::test_the_killed_rank_of_a_recipe_is_named_and_nothing_is_left": ["1"],
    # The same arithmetic of chunks, with small ones, is among the promises of a communicator.
    "mpi/test_large_messages.py::test_a_message_of_more_than_2_gib_arrives_byte_for_byte": [],
    # `ttlaunch parity` has pipelines and parameter servers over real ranks; buckets are the same over any transport.
    "mpi/test_recipes.py::test_a_pipeline_equals_one_process": [],
    "mpi/test_recipes.py::test_no_recipe_relies_on_buffered_sends": [
        "pipeline_parallel-roles2-config2",
        "sync_ps-roles7-config7",
    ],
    "mpi/test_recipes.py::test_other_schedules_and_replicas_equal_one_process": [],
    "mpi/test_recipes.py::test_parameter_servers_equal_one_process": [],
    "mpi/test_recipes.py::test_small_buckets_equal_one_process": [],
    "mpi/test_recipes.py::test_the_sum_over_all_ranks_is_right": ["3"],
    "mpi/test_recipes.py::test_tiers_equal_one_process": ["server1-3"],
    "mpi/test_resume.py::test_a_run_goes_on_in_any_layout": ["four stages-two tiers", "single-three tiers"],
    "mpi/test_resume.py::test_killed_while_saving_the_run_goes_on_to_the_same_bits": ["the supervisor"],
    "mpi/test_communicators.py::test_every_promise_of_a_socket_is_kept": [
        "in chunks-3",
        "synchronous-1",
        "synchronous-3",
    ],
    "mpi/test_communicators.py::test_fabric_sockets_keep_every_promise": ["3"],
    "mpi/test_traffic.py::test_tiers_move_what_they_say_over_real_transports": ["mpi"],
    "mpi/test_trainer_parts.py::test_all_parts_together_have_the_bits_of_one_process": ["data parallel"],
    "mpi/test_zero.py::test_no_stage_relies_on_buffered_sends": ["3"],
    "mpi/test_zero.py::test_workers_train_to_the_bits_of_one_process": ["2-3"],
    "running/membership/test_outside.py::test_eight_workers_have_the_ranks_of_their_numbers_in_whatever_order_they_come": [
        *map(str, range(12))
    ],
    "running/test_added_ranks.py::test_an_added_rank_that_fails_is_named_and_ends_the_run": [
        "False-raised-R002",
        "True-killed-R004",
    ],
    "running/test_chaos.py::test_a_fault_is_named_in_time_and_leaves_nothing": [
        "kill mpirun at 1s",
        "kill rank=1 at 1s",
        "stop rank=1 at 1s",
    ],
    "running/test_elastic_runs.py::test_a_last_checkpoint_whose_writer_is_killed_while_it_writes_is_made_again_by_another_worker": [
        ".safetensors"
    ],
    "running/test_elastic_runs.py::test_a_run_whose_supervisor_is_killed_goes_on_without_a_lost_step_from_the_memory_of_its_workers": [
        "data_parallel"
    ],
    "running/test_elastic_runs.py::test_killed_workers_are_replaced_and_the_parameters_are_those_of_one_process": [
        "kills1-True"
    ],
    "running/test_elastic_runs.py::test_slots_that_no_worker_has_alone_outlive_the_supervisor": ["3"],
    "running/test_elastic_runs.py::test_what_workers_have_in_common_outlives_the_supervisor_also_where_bits_depend_on_who_comes": [
        "classic_dp"
    ],
    "running/test_elastic_runs_with_old_gradients.py::test_a_worker_that_comes_later_gets_weights_and_tasks_from_the_server": [
        "2"
    ],
    "running/test_elastic_runs_with_old_gradients.py::test_tasks_of_workers_that_are_killed_are_handed_out_again": [
        "kills1"
    ],
    "running/test_elastic_runs_with_old_gradients.py::test_workers_that_lead_by_some_steps_are_lost": ["3-kills1"],
    "running/test_endings.py::test_after_ctrl_c_all_ranks_save_and_leave_after_the_same_step": ["two tiers"],
    # Each role once; the other faults are tried on scripts, under every engine.
    "running/test_faults.py::test_a_broken_rank_ends_the_run_and_is_named": [
        "aggregator-segv",
        "optimizer-exit-0",
        "worker-exception",
    ],
    "running/test_forked_ranks.py::test_forked_ranks_have_the_losses_of_others_to_the_bit": ["ddp"],
    # One recipe of each kind of process: a replica, a stage, and one that answers instead of training.
    "running/test_forked_recipes.py::test_what_ranks_of_a_recipe_share_has_one_thread_and_no_transport": [
        "data_parallel",
        "serve",
    ],
    "running/test_hangs.py::test_a_hang_is_noticed_in_time_and_the_right_rank_is_named": ["recv-recv", "stopped"],
    "running/test_shadowed_servers.py::test_servers_that_are_killed_one_after_the_other_leave_the_parameters_of_one_process": [
        "hierarchical_parallel-arguments0"
    ],
    "runtime/elastic/test_local_steps.py::test_a_worker_that_comes_begins_with_the_agreed_weights": ["diloco-6"],
    "runtime/elastic/test_local_steps.py::test_when_a_worker_is_killed_the_others_end_with_the_bits_of_the_replay": [
        "diloco-in a sum-8",
        "local_sgd-in an average-8",
    ],
    "runtime/elastic/test_shadowed_servers.py::test_a_server_or_its_shadow_or_a_worker_is_killed": [
        "kind0-0-with the mean",
        "kind2-1-before the mean",
    ],
    "runtime/elastic/test_shadowed_servers.py::test_whoever_is_killed_the_others_go_on_with_the_same_bits": [
        "0-after the update",
        "2-in a backward pass",
    ],
    "runtime/elastic/test_shadowed_shards.py::test_a_step_that_one_member_has_made_is_made_up_by_the_others_from_its_norm": [
        "3"
    ],
    "runtime/elastic/test_shadowed_shards.py::test_at_every_stage_the_shadow_of_a_killed_owner_goes_on_with_the_same_bits": [
        "1-after the update",
        "3-when a layer's sums leave",
    ],
    "runtime/elastic/test_shadowed_shards.py::test_whenever_an_owner_is_killed_the_others_go_on_with_the_same_bits": [
        "when a mean is made"
    ],
    "runtime/elastic/test_workers.py::test_when_a_worker_is_killed_the_others_go_on_with_the_same_bits": [
        "in a validation",
        "while buckets are under way",
    ],
    # Messages in random order: some seeds, of which each has hundreds of events.
    "runtime/test_grpc_channels.py::test_every_receive_gets_its_message_in_any_order_of_events": [
        f"{seed}-{window}" for seed in range(5) for window in (16384, -1)
    ],
    "runtime/test_grpc_channels.py::test_messages_of_two_epochs_never_mix_in_any_order_of_events": [
        *map(str, range(8))
    ],
    "runtime/test_grpc_node_sums.py::test_a_total_is_there_exactly_if_its_leaves_are_and_has_each_once": [
        *map(str, range(5))
    ],
    # Every layout has an overflow, a scale that falls or a scale that stays, and all of them the same bits.
    "runtime/test_loss_scaling.py::test_a_scale_that_is_far_too_large_finds_its_way_down": [
        "single",
        "three tiers",
        "two pipelines",
    ],
    "runtime/test_loss_scaling.py::test_a_smallest_scale_that_is_too_large_is_said_once_at_once_and_in_the_end": [
        "two tiers",
        "data parallel",
        "pipeline",
    ],
    "runtime/test_loss_scaling.py::test_an_overflow_of_one_micro_batch_is_skipped_by_everybody": [
        "data parallel",
        "three tiers",
        "two pipelines",
        "two servers",
        "workers of two ranks",
    ],
    "runtime/test_loss_scaling.py::test_the_scale_survives_a_resume": [
        "single",
        "two servers",
        "workers of two ranks",
    ],
    # Every layout with GPT, and each other model in layouts that divide it differently.
    "runtime/test_precision.py::test_bf16_has_the_same_bits_in_every_layout": [
        "False-gpt-data parallel",
        "False-gpt-three tiers",
        "False-gpt-workers of two ranks",
        "True-gpt-pipeline",
        "True-gpt-two servers",
        "True-gpt-two tiers",
        "True-llama-three tiers",
        "True-llama-two pipelines",
        "False-mlp-pipeline",
    ],
    # A checkpoint holds whole tensors whoever wrote it: every layout before and after, with four others each.
    "runtime/test_resume_layouts.py::test_any_layout_goes_on_where_any_other_was_interrupted": [
        "data parallel-single",
        "data parallel-two pipelines",
        "pipeline-two servers",
        "single-pipeline",
        "single-single",
        "single-workers of two ranks",
        "three tiers-data parallel",
        "two pipelines-two tiers",
        "two servers-single",
        "two servers-three tiers",
        "two tiers-pipeline",
        "workers of two ranks-single",
    ],
    # `benchmarks/attribution.py` breaks them all, at random.
    "running/test_culprits.py::test_the_broken_rank_is_named_with_its_cause": [
        "os._exit",
        "SIGSEGV",
        "memory",
        "import",
        "left",
        "words",
        "SIGKILL",
    ],
    "running/test_culprits.py::test_a_rank_that_closes_its_connections_first_is_named_and_not_those_that_notice": [
        'raise ValueError("bucket 7")-4-R002-raised',
        "os._exit(0)-0-R005-left_early",
    ],
    "running/test_culprits.py::test_a_rank_that_takes_long_to_end_after_it_closed_its_connections_is_waited_for": [
        "slow library",
        "kept by C",
        "another program",
    ],
    "running/test_faults.py::test_a_signal_to_the_launcher_ends_every_rank": [
        "ctrl-c-stubborn",
        "term-obedient",
        "time limit-stubborn",
    ],
    "running/test_hangs.py::test_the_rank_of_a_program_that_holds_up_the_others_is_named": [
        "finalize",
        "another collective",
        "thread",
        "stopped shim",
    ],
    "running/test_forked_ranks.py::test_a_fault_in_forked_ranks_or_the_process_that_forks_them_is_named_and_leaves_nothing": [
        "kill rank=1 at 1s-R004-1",
        "kill mpirun at 1s-R008-None",
    ],
    "running/test_forked_recipes.py::test_a_fault_in_a_forked_rank_of_a_recipe_is_named_and_leaves_nothing": [
        "stop-R013"
    ],
    # What a lie is, is checked in `records/`; these are the ones that are found at different places.
    "security/test_hostile_runs.py::test_a_lie_ends_the_run_in_the_name_of_its_host_and_takes_nothing_from_the_others": [
        "openmpi-an end of another host's rank",
        "openmpi-a time of four thousand digits",
        "agents-an end of endless words",
    ],
    "security/test_hostile_runs.py::test_a_host_that_reports_the_end_of_its_ranks_without_their_records_is_named": [
        "again and again",
        "in the words of another host",
    ],
    "security/test_hostile_runs.py::test_a_host_that_greets_again_and_again_and_then_falls_silent_is_lost": ["agents"],
    "mpi/test_staged_messages.py::test_every_promise_is_kept_while_copies_are_late": [
        "buffered-3",
        "synchronous-2",
        "in chunks-2",
    ],
    # The process that forks is killed in `running/test_forked_ranks.py`.
    "agent/test_warm_start.py::test_whoever_of_a_warm_run_is_killed_nothing_is_left_and_the_culprit_is_named": [
        "shim-R006-1-was lost: its shim was killed from outside",
        "supervisor-None-None-None",
    ],
    "app/test_library.py::test_ctrl_c_while_a_run_starts_leaves_none": ["0.4", "1.2"],
    "engines/test_conformance.py::test_a_value_reaches_the_ranks_whatever_it_holds": ["agents", "mpich", "open-mpi-5"],
    "engines/test_conformance.py::test_logs_hold_what_ranks_print_byte_for_byte": ["agents", "mpich", "open-mpi-5"],
    "mpi/test_recipes.py::test_a_rank_that_raises_leaves_a_record_and_ends_the_world": [
        "raise ValueError('no such bucket')-ValueError-no such bucket",
        "raise SystemExit(0)-SystemExit-0",
    ],
    "running/test_elastic_runs.py::test_a_stopped_server_or_worker_is_replaced_and_those_that_wait_for_it_are_not": [
        "0"
    ],
    "running/test_elastic_runs.py::test_a_run_whose_last_worker_is_killed_names_it": ["pid-R004"],
    "security/test_listening.py::test_a_run_of_a_script_listens_on_loopback_alone_and_only_in_its_ranks": ["warm"],
    "security/test_listening.py::test_no_other_user_reaches_mpirun_once_the_ranks_of_a_recipe_have_found_each_other": [
        "openmpi"
    ],
    # The umask that forbids a group everything.
    "security/test_run_folder_rights.py::test_a_group_can_read_a_run_that_is_shared_with_it": ["63"],
    "serving/test_chat_page.py::test_axe_finds_no_violation": ["1000-dark", "360-light"],
    "serving/test_chat_page.py::test_stopping_an_answer_ends_it_in_the_server": ["button", "closed tab"],
    "running/test_added_ranks.py::test_an_added_rank_runs_beside_the_first_ones_and_is_recorded_as_they_are": ["True"],
    "cluster/test_elastic_supervisor_dies.py::test_no_step_is_lost_when_the_supervisor_of_a_run_over_hosts_is_killed": [
        "zero"
    ],
    "cluster/test_exported_pods.py::test_the_commands_of_exported_pods_run_a_script_on_every_worker": ["jobset"],
    "cluster/test_slurm_runs.py::test_a_request_that_slurm_will_never_meet_is_refused_and_leaves_the_queue": [
        "run where.py --on slurm:nope-error[H046]: Slurm gives no hosts: invalid partition specified: nope",
        "run where.py --on slurm --gres gpu:9-error[H046]: Slurm gives no hosts: ",
    ],
    "cluster/test_slurm_runs.py::test_a_killed_launcher_leaves_no_job_and_no_process": ["9"],
    "cluster/test_slurm_runs.py::test_a_cancelled_job_is_named_as_the_cause_and_leaves_nothing": ["None"],
    "cluster/test_submit.py::test_what_slurm_refuses_is_a_diagnostic_with_its_words_and_leaves_nothing": [
        "--on slurm:nowhere-invalid partition specified: nowhere"
    ],
    "cluster/test_doctor.py::test_ranks_and_daemons_may_use_different_networks": ["eth1"],
    # Worlds of another shape, each with its own matrix or with the shared one.
    "runtime/test_tensor_parallel.py::test_any_layout_goes_on_from_the_checkpoint_of_any_other": [
        "2-after0",
        "4-after1",
        "2-after5",
        "1-after4",
    ],
    "runtime/test_tensor_parallel.py::test_stages_and_replicas_of_a_split_model_change_no_bit": [
        "-dp 2 x pp 2 x tp 2",
        "tied-dp 3 x tp 2",
        "tied-pp 2 x tp 2",
    ],
    "runtime/test_tensor_parallel.py::test_workers_that_split_the_model_equal_one_process_up_to_rounding": [
        "-a square",
        "-both",
        "tied-two workers",
    ],
    # Bytes and messages follow a formula with a term for each key: every key with every value, most pairs of them.
    "runtime/test_traffic.py::test_a_pipeline_moves_what_it_says": [
        "[1, 1]-{'replicas': 2}-4",
        "[1, 2, 1]-{'schedule': 'gpipe'}-7",
        "[1]-{'replicas': 2}-7",
        "[2, 1]-{'replicas': 3}-4",
        "[2, 1]-{'schedule': '1f1b'}-7",
        "[2, 2, 2]-{'schedule': 'interleaved', 'chunks_per_rank': 2}-4",
        "[2, 2]-{'schedule': 'interleaved', 'chunks_per_rank': 2, 'replicas': 2}-7",
    ],
    "runtime/test_traffic.py::test_a_resumed_run_moves_what_it_says": [
        "data parallel--between validations",
        "pipeline--one step",
        "three tiers--after a validation",
        "three tiers-may stop early-between validations",
        "two tiers--nothing is left",
        "zero-may stop early-nothing is left",
    ],
    "runtime/test_traffic.py::test_a_split_model_moves_what_it_says": [
        "2-1-4-{'model_type': 'mlp'}",
        "2-2-3-{'activation_checkpointing': True}",
        "2-2-3-{}",
        "4-1-2-{}",
    ],
    "runtime/test_traffic.py::test_an_asynchronous_server_moves_what_its_workers_say": [
        "1-int8-{}",
        "1-none-{'is_ahead': False, 'pull_interval': 2}",
        "3-int8-{'is_ahead': False, 'pull_interval': 2}",
        "3-none-{}",
    ],
    "runtime/test_traffic.py::test_compressed_gradients_move_what_they_say": [
        "2-int8",
        "2-powersgd",
        "3-bf16",
        "3-powersgd",
        "3-top_k",
    ],
    "runtime/test_traffic.py::test_every_precision_moves_what_it_says": [
        "data parallel-bf16",
        "pipeline-fp16",
        "two tiers-bf16",
    ],
    "runtime/test_traffic.py::test_every_zero_stage_moves_what_it_says": [
        "1-4-0",
        "2-4-1",
        "2-4-2",
        "2-4-3",
        "3-8-0",
        "3-8-3",
    ],
    "runtime/test_traffic.py::test_stages_that_share_a_matrix_exchange_its_gradient_once_a_step": [
        "[2, 2, 2]-{'replicas': 2}",
        "[2, 2, 2]-{}",
        "[2, 2]-{'schedule': 'interleaved', 'chunks_per_rank': 2}",
        "[2, 2]-{}",
        "[4]-{'replicas': 2}",
    ],
    "runtime/test_traffic.py::test_synchronous_servers_move_what_they_say": [
        "1-1-4-",
        "2-1-3-averaged",
        "2-3-4-averaged",
        "3-2-8-",
    ],
    "runtime/test_traffic.py::test_tiers_move_what_they_say": [
        "1-4-two tiers",
        "2-3-three tiers",
        "2-4-two tiers",
        "3-3-two tiers",
        "3-8-three tiers",
        "4-7-three tiers",
    ],
    "runtime/test_traffic.py::test_workers_of_several_ranks_move_what_they_say": [
        "1-3-4-two tiers",
        "2-2-4-three tiers",
        "2-2-7-two tiers",
        "2-3-8-three tiers",
    ],
    "runtime/test_zero.py::test_a_matrix_that_two_layers_share_has_one_owner": [
        "2-{}-1",
        "2-{}-3",
        "3-{'model_type': 'mlp'}-0",
        "3-{'model_type': 'mlp'}-2",
        "3-{'model_type': 'mlp'}-3",
    ],
    "runtime/test_zero.py::test_every_stage_trains_to_the_bits_of_one_process": [
        "0-3",
        "1-2",
        "1-4",
        "2-3",
        "3-2",
        "3-3",
        "3-4",
    ],
    # Layouts that carry out the same arithmetic: each kind of rank once, each key that is told apart with some of them.
    "recipes/test_naive.py::test_a_naive_form_has_the_bits_of_its_recipe": [
        "data_parallel1",
        "local_sgd0",
        "diloco1",
        "hierarchical_parallel",
        "sync_ps0",
        "pipeline_parallel",
        "zero0",
        "classic_dp",
        "tensor_parallel0",
    ],
    "runtime/test_pipeline.py::test_every_schedule_and_number_of_replicas_equals_one_process": [
        "1-blocks1-gpipe-1",
        "2-blocks0-gpipe-1",
        "1-blocks3-1f1b-1",
        "2-blocks2-1f1b-1",
        "1-blocks4-1f1b-1",
        "1-blocks6-interleaved-2",
        "2-blocks7-interleaved-2",
        "1-blocks8-interleaved-4",
        "2-blocks5-interleaved-2",
        "2-blocks9-interleaved-2",
    ],
    "runtime/test_resume_layouts.py::test_the_momentum_of_sgd_goes_on_too": [
        "data parallel",
        "pipeline",
        "two servers",
        "two tiers",
    ],
    "runtime/test_precision.py::test_checkpointing_activations_changes_no_bit": [
        "single",
        "pipeline",
        "two servers",
        "workers of two ranks",
    ],
    "runtime/test_layer_norms.py::test_every_layout_reports_every_layer_once_with_the_same_bits": [
        "False-data parallel",
        "False-pipeline",
        "False-two servers",
        "False-two tiers",
        "True-pipeline",
        "True-three tiers",
        "True-two pipelines",
        "True-workers of two ranks",
    ],
    "runtime/test_tied.py::test_pipelines_equal_one_process": [
        "1-pipeline0-mlp",
        "2-pipeline1-gpt",
        "2-pipeline4-gpt",
        "3-pipeline2-gpt",
        "3-pipeline2-mlp",
        "4-pipeline3-gpt",
    ],
    "runtime/test_tied.py::test_tiers_and_data_parallelism_equal_one_process": [
        "data parallel-True",
        "three tiers-True",
        "two pipelines-True",
        "two servers-False",
        "two tiers-False",
        "workers of two ranks-False",
    ],
    "runtime/test_tied.py::test_blocks_move_around_a_shared_matrix": [
        "fp16",
        "fp32",
    ],
    "runtime/test_traffic.py::test_a_pipeline_whose_stages_are_split_moves_what_it_says": [
        "[1, 1]-{}-tied",
        "[2, 1]-{'replicas': 2, 'schedule': 'gpipe'}-",
        "[2, 2]-{'schedule': 'interleaved', 'chunks_per_rank': 2}-tied",
        "[2]-{}-",
    ],
    "runtime/test_traffic.py::test_workers_that_split_the_model_move_what_they_say": [
        "tp and ddp-three tiers-",
        "tp and ddp-two tiers-all that is agreed",
        "tp-three tiers-all that is agreed",
        "tp-two tiers-",
    ],
    "runtime/test_drift_traffic.py::test_a_resumed_run_moves_what_it_says": [
        "classic_dp-2",
        "diloco-3",
        "diloco-4",
        "local_sgd-3",
        "local_sgd-4",
    ],
    "runtime/test_drift_traffic.py::test_averages_move_what_they_say": [
        "diloco-2-3-4",
        "diloco-2-4-7",
        "diloco-9-4-7",
        "local_sgd-1-2-4",
        "local_sgd-3-3-4",
        "local_sgd-3-4-7",
    ],
    "lab/test_audits.py::test_audits_change_no_bit_of_a_training_and_all_of_them_agree": [
        "data_parallel",
        "hierarchical_parallel",
        "sync_ps with a codec",
        "zero, stage 1",
    ],
    "lab/test_audits.py::test_a_gradient_that_one_rank_gets_wrong_once_ends_the_run_before_the_update_and_names_the_rank": [
        "data_parallel",
        "hierarchical_parallel",
        "sync_ps",
        "zero, stage 2",
    ],
    "runtime/test_images.py::test_every_layout_classifies_digits_with_the_same_bits": [
        "data parallel",
        "pipeline",
        "two tiers",
        "workers of two ranks",
    ],
    "runtime/test_metrics.py::test_every_layout_reports_every_metric_of_every_step_with_the_same_bits": [
        "data parallel",
        "two pipelines",
        "two servers",
        "two tiers",
        "workers of two ranks",
    ],
    "runtime/test_metrics.py::test_the_metrics_are_what_they_are_called": [
        "data parallel",
        "two pipelines",
        "two servers",
        "two tiers",
        "workers of two ranks",
    ],
    "runtime/test_early_stop.py::test_every_layout_ends_at_the_same_step_with_the_same_bits": [
        "data parallel",
        "two pipelines",
        "two servers",
        "two tiers",
    ],
    "runtime/test_early_stop.py::test_a_run_that_goes_on_ends_where_the_uninterrupted_one_did": [
        "single",
        "pipeline",
        "three tiers",
        "two servers",
    ],
    "runtime/test_masked_tokens.py::test_masked_training_has_the_same_bits_in_every_layout": [
        "pipeline",
        "two servers",
        "two tiers",
        "workers of two ranks",
    ],
    "runtime/test_weights.py::test_every_layout_begins_with_the_bits_of_the_file": [
        "single",
        "two pipelines",
        "two servers",
        "two tiers",
        "workers of two ranks",
    ],
    "runtime/test_weights.py::test_the_exported_file_has_the_bits_that_training_ended_with": [
        "data parallel",
        "pipeline",
        "three tiers",
        "two servers",
    ],
    "runtime/test_loss_scaling.py::test_fp16_has_the_same_bits_in_every_layout": [
        "data parallel",
        "pipeline",
        "two servers",
        "two tiers",
    ],
    "runtime/test_llama.py::test_a_llama_has_the_same_bits_in_every_layout": [
        "fp16-pipeline",
        "fp16-two servers",
        "fp32-two tiers",
        "fp32-zero",
    ],
    "runtime/test_digests.py::test_the_same_bit_flipped_in_two_values_changes_the_digest": [
        "0",
        "1",
        "8",
        "15",
        "16",
        "23",
        "24",
        "30",
        "31",
    ],
    "runtime/test_checkpoints.py::test_any_layout_reads_the_checkpoint_of_any_other": [
        "single-two tiers",
        "single-three tiers",
        "two tiers-three tiers",
        "two tiers-two stages",
        "three tiers-two stages",
        "three tiers-three stages",
        "two stages-three stages",
        "two stages-four stages",
        "three stages-four stages",
        "three stages-single",
        "four stages-single",
        "four stages-two tiers",
    ],
    "runtime/test_hollow.py::test_a_step_without_values_allocates_what_one_with_values_does": [
        "Images-adamw-fp32",
        "Images-sgd-bf16",
        "Transformer-adamw-bf16",
        "Transformer-sgd-fp32",
    ],
    "runtime/test_model.py::test_it_overfits_one_batch": [
        "adamw-gpt",
        "adamw-mlp",
        "sgd-llama",
    ],
    "runtime/test_zero_resume.py::test_training_goes_on_in_another_layout": [
        "(2, 0)-(3, 2)",
        "(2, 2)-pipeline",
        "(3, 3)-(2, 1)",
        "single-(3, 3)",
        "two tiers-(2, 2)",
    ],
    "runtime/serving/test_ranks.py::test_raw_logits_over_ranks_are_those_of_training": [
        "columns-2-160",
        "columns-4-256",
        "columns-4-64",
        "stages-2-128",
        "stages-3-160",
        "stages-3-256",
    ],
    "runtime/serving/test_ranks.py::test_what_ranks_send_is_the_formula": [
        "columns",
        "columns llama",
        "stages",
    ],
    "museum/test_museum.py::test_ours_pass_every_check": [
        "as_it_should_be-worker-worker-server",
        "as_it_should_be-worker-worker-worker",
        "data_parallel-worker-worker-worker",
        "hierarchical_parallel-worker-worker-aggregator-optimizer",
        "hierarchical_parallel-worker-worker-worker-aggregator_optimizer",
        "sync_ps-worker-worker-worker-server-server",
        "zero-worker-worker-worker",
    ],
    "planning/test_parity.py::test_the_command_of_a_cell_plans_what_the_cell_says": [
        "ZeRO 1, 3 ranks, accumulation 3, bf16",
        "ZeRO 2, 4 ranks, accumulation 3, fp16",
        "ZeRO 3, 2 ranks, accumulation 3, fp32",
        "ZeRO 3, 3 ranks, accumulation 3, bf16",
        "ZeRO 3, 4 ranks, accumulation 3, fp16",
        "data parallel, 1 rank, accumulation 3, fp32",
        "data parallel, 2 ranks, accumulation 3, bf16",
        "data parallel, 3 ranks, accumulation 3, fp16",
        "data parallel, 4 ranks, accumulation 3, fp32",
        "never stale, 4 ranks, accumulation 3, bf16",
        "one process, 1 rank, accumulation 3, fp16",
        "one server, 4 ranks, accumulation 3, fp32",
        "pipeline, 2 ranks, accumulation 3, bf16",
        "pipeline, 3 ranks, accumulation 3, fp16",
        "pipeline, 4 ranks, accumulation 3, fp32",
        "three tiers, 3 ranks, accumulation 3, bf16",
        "three tiers, 4 ranks, accumulation 3, fp16",
        "three tiers, 5 ranks, accumulation 3, fp32",
        "three tiers, 6 ranks, accumulation 3, bf16",
        "tiers of pairs, 5 ranks, accumulation 3, fp16",
        "two pipelines, 4 ranks, accumulation 3, fp32",
        "two servers, 4 ranks, accumulation 3, bf16",
        "two tiers, 2 ranks, accumulation 3, fp16",
        "two tiers, 3 ranks, accumulation 3, fp32",
        "two tiers, 4 ranks, accumulation 3, bf16",
        "two tiers, 5 ranks, accumulation 3, fp16",
    ],
    "running/metrics/test_columns.py::test_columns_have_the_steps_times_and_bits_of_events": [*map(str, range(7))],
    "cli/test_schema.py::test_a_shipped_file_fits_its_schema_until_a_key_is_misspelled": [
        "train --recipe sync_ps-sync_ps-train.yaml",
        "train --recipe data_parallel-data_parallel-train.yaml",
        "train --recipe pipeline_parallel-pipeline_parallel-train.yaml",
        "train --recipe serve-serve-train.yaml",
        "train --recipe fabric_minimal-fabric_minimal-train.yaml",
        "train --recipe hierarchical_parallel-hierarchical_parallel-train.yaml",
        "mgd-5loudboxes-mgd.yaml",
        "bindings-5loudboxes-rank_bindings.yaml",
    ],
    # A pipe and a device, nesting and an early end are each tried on two files, and each file with two of them.
    "security/test_a_strangers_run.py::test_a_file_of_a_run_that_is_none_neither_blocks_nor_fills_memory": [
        "device-launcher.json",
        "device-records/rank-0.progress.jsonl",
        "early-events.jsonl",
        "early-report.json",
        "nested-launcher.json",
        "nested-records/rank-0.progress.jsonl",
        "pipe-events.jsonl",
        "pipe-report.json",
    ],
}


LONGEST = (
    "running/test_elastic_runs.py",
    "cluster/test_bare_to_run.py",
    "engines/test_conformance.py",
    "cluster/test_slurm_runs.py",
    "mpi/test_resume.py",
    "cluster/test_submit.py",
    "mpi/test_frameworks.py",
    "cluster/test_run.py",
    "mpi/test_exported_model.py",
    "cluster/test_run_faults.py",
    "agent/test_warm_start.py",
    "cluster/test_listening.py",
    "running/test_culprits.py",
    "cluster/test_doctor.py",
    "running/test_elastic_runs_with_old_gradients.py",
    "cluster/test_prepare.py",
    "mpi/test_recipes.py",
    "cluster/test_hang_over_hosts.py",
    "mpi/test_fully_sharded.py",
    "cluster/test_elastic_over_hosts.py",
    "mpi/test_served_run.py",
    "cluster/test_forked_ranks_over_hosts.py",
    "mpi/test_repro.py",
    "cluster/test_serve_over_hosts.py",
    "running/test_forked_ranks.py",
    "cluster/test_run_restarts.py",
    "running/test_forked_recipes.py",
    "cluster/test_grpc_over_hosts.py",
    "mpi/test_serve.py",
    "cluster/test_sync.py",
    "running/test_torch_scripts.py",
    "cluster/test_hydra_over_hosts.py",
    "running/test_shadowed_servers.py",
    "mpi/test_flipped_bits.py",
    "running/test_faults.py",
    "running/test_hangs.py",
    "engines/test_recipes_over_grpc.py",
    "torch_hooks/test_recorded_calls.py",
    "mpi/test_verify.py",
    "running/test_life_after_the_terminal.py",
    "security/test_hostile_runs.py",
    "running/test_elastic_shards.py",
    "app/test_tutorial.py",
    "cli/test_json_schemas.py",
    "app/test_library.py",
)
"""Files whose tests take more than half a minute together, the longest first: one that is left to the end keeps other processes idle.

Those over hosts, which wait for much of their time, stand between those with ranks of this machine, which compute."""


def begin_with_the_longest(items):
    """Put the tests of the longest files first; the order of all others stays."""
    places = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def cells_to_leave_out(items):
    """Those of the collected tests that a run without `--every-cell` does not have."""
    return [item for item in items if (kept := KEPT.get(_claim(item))) is not None and _cell(item) not in kept]


def _claim(item):
    return item.nodeid.partition("tests/")[2].partition("[")[0]


def _cell(item):
    return item.nodeid.partition("[")[2].removesuffix("]")
