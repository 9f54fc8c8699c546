"""Tests that repeat one claim over many recipes, layouts or ways to break, and the cells of each that every run has.

The others are left out unless `--every-cell` is given or a cell is named; `benchmarks/matrices.py` runs them all. A claim
stays in every run with the cells that are likeliest to break it, or where the same code is run in one process:
`tests/runtime` has all layouts, `ttlaunch parity` all of them over real ranks.
"""

KEPT = {
    "cli/test_simulate.py::test_a_simulated_recipe_has_the_bits_of_a_run": ["pipeline"],
    "cluster/test_bare_to_run.py::test_other_recipes_run_on_prepared_hosts": ["fabric_minimal"],
    "cluster/test_chaos.py::test_a_fault_on_a_host_is_named_and_nothing_is_left_on_any": ["cut host=node1 at 1s"],
    "cluster/test_elastic_over_hosts.py::test_a_worker_of_a_machine_outside_the_cluster_joins_workers_on_hosts_and_changes_no_bit": [
        "2"
    ],
    # The others need packages that `benchmarks/frameworks.py` fetches.
    "cluster/test_frameworks.py::test_a_script_has_the_losses_of_torchrun_here_and_over_two_hosts": [
        "accelerated",
        "ddp",
        "fabric",
        "fsdp2",
        "lightning_trainer",
    ],
    "cluster/test_run.py::test_recipes_run_across_four_hosts": ["fully_sharded-settings1"],
    "cluster/test_run_faults.py::test_a_killed_process_is_named_with_its_host": ["rank-agents", "shim-openmpi"],
    "cluster/test_run_faults.py::test_a_run_whose_daemon_on_a_host_was_killed_has_failed": ["openmpi", "warm"],
    "cluster/test_run_faults.py::test_a_signal_ends_the_run_on_every_host": ["15-agents", "2-openmpi"],
    # A status and a signal for every engine, the others for those that most runs have.
    "engines/test_conformance.py::test_a_rank_that_exits_is_named_and_the_others_are_ended": [
        "agents-255",
        "agents-3",
        "bash-3",
        "mpich-3",
        "open-mpi-4-3",
        "open-mpi-5-255",
        "open-mpi-5-3",
    ],
    "engines/test_conformance.py::test_a_signal_to_the_launcher_lets_ranks_end_in_their_own_way": [
        "agents-15-143",
        "agents-2-130",
        "bash-2-130",
        "mpich-15-143",
        "open-mpi-4-2-130",
        "open-mpi-5-15-143",
        "open-mpi-5-2-130",
    ],
    "mpi/test_data_parallel.py::test_workers_equal_one_process": ["4"],
    "mpi/test_drift.py::test_local_steps_have_the_bits_of_a_simulation": ["diloco"],
    "mpi/test_drift.py::test_workers_that_lead_end_with_equal_weights": ["synchronous"],
    "mpi/test_fully_sharded.py::test_the_losses_are_those_of_one_process": ["4-{'shard': 'all', 'replicas': 2}"],
    # The same arithmetic of chunks, with small ones, is among the promises of a communicator.
    "mpi/test_large_messages.py::test_a_message_of_more_than_2_gib_arrives_byte_for_byte": [],
    "mpi/test_recipes.py::test_a_pipeline_equals_one_process": ["blocks0"],
    "mpi/test_recipes.py::test_no_recipe_relies_on_buffered_sends": [
        "hierarchical_parallel-roles0-config0",
        "pipeline_parallel-roles2-config2",
        "sync_ps-roles7-config7",
    ],
    "mpi/test_recipes.py::test_other_schedules_and_replicas_equal_one_process": ["2-pipeline0"],
    "mpi/test_recipes.py::test_the_sum_over_all_ranks_is_right": ["3"],
    "mpi/test_recipes.py::test_tiers_equal_one_process": ["server1-3"],
    "mpi/test_resume.py::test_a_run_goes_on_in_any_layout": ["four stages-two tiers", "single-three tiers"],
    "mpi/test_resume.py::test_killed_while_saving_the_run_goes_on_to_the_same_bits": ["the supervisor"],
    "mpi/test_communicators.py::test_every_promise_of_a_socket_is_kept": [
        "buffered-2",
        "in chunks-3",
        "synchronous-1",
        "synchronous-3",
    ],
    "mpi/test_communicators.py::test_fabric_sockets_keep_every_promise": ["3"],
    # All ways are compared with each other in the test beside it.
    "mpi/test_serve.py::test_tokens_are_those_of_the_forward_pass_of_training": ["columns of four", "three stages"],
    "mpi/test_traffic.py::test_tiers_move_what_they_say_over_real_transports": ["mpi"],
    "mpi/test_trainer_parts.py::test_all_parts_together_have_the_bits_of_one_process": ["data parallel"],
    "mpi/test_zero.py::test_no_stage_relies_on_buffered_sends": ["3"],
    "mpi/test_zero.py::test_workers_train_to_the_bits_of_one_process": ["2-3"],
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
        "kills1"
    ],
    "running/test_elastic_runs.py::test_slots_that_no_worker_has_alone_outlive_the_supervisor": ["3"],
    "running/test_elastic_runs.py::test_what_workers_have_in_common_outlives_the_supervisor_also_where_bits_depend_on_who_comes": [
        "classic_dp"
    ],
    "running/test_endings.py::test_after_ctrl_c_all_ranks_save_and_leave_after_the_same_step": [
        "one process",
        "two tiers",
    ],
    # Each fault once, each role at least once.
    "running/test_faults.py::test_a_broken_rank_ends_the_run_and_is_named": [
        "aggregator-exit-3",
        "aggregator-segv",
        "optimizer-exit-0",
        "worker-exception",
        "worker-kill",
    ],
    # One recipe of each kind of process: a replica, a stage, and one that answers instead of training.
    "running/test_forked_recipes.py::test_what_ranks_of_a_recipe_share_has_one_thread_and_no_transport": [
        "data_parallel",
        "pipeline_parallel",
        "serve",
    ],
    "running/test_hangs.py::test_a_hang_is_noticed_in_time_and_the_right_rank_is_named": ["recv-recv", "stopped"],
}


def cells_to_leave_out(items):
    """Those of the collected tests that a run without `--every-cell` does not have."""
    return [item for item in items if (kept := KEPT.get(_claim(item))) is not None and _cell(item) not in kept]


def _claim(item):
    return item.nodeid.partition("tests/")[2].partition("[")[0]


def _cell(item):
    return item.nodeid.partition("[")[2].removesuffix("]")
