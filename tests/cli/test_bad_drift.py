"""Configurations of recipes whose workers drift apart that cannot train; the transcripts are in `tests/golden/refusals/`."""


def test_bounded_staleness_over_fabric_sockets_is_refused(refused):
    text = "multihost_config:\n  socket_type: fabric\nclassic_dp_config:\n  staleness_bound: 4\n"
    refused("run classic_dp -c train.yaml", files={"train.yaml": text}, status=3)


def test_a_loss_scale_for_every_worker_is_refused(refused):
    refused("run diloco -c train.yaml", files={"train.yaml": "training_config:\n  precision: fp16\n"}, status=3)


def test_resume_of_local_steps_with_other_workers_is_refused(refused, trained):
    """Every worker has moments of its own, so here the number of workers belongs to the training."""
    trained("a", 10, recipe="local_sgd")
    refused("run local_sgd --resume latest --set multihost_config.num_workers=3", status=3)
