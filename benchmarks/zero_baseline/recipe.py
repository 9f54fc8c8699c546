"""What `benchmarks/zero.py` measures ZeRO against: torch's FSDP2 as its documentation shows it, around the same model."""

from ttlaunch.recipe import Layout, Recipe, TrainingFile, per

RECIPE = Recipe(
    summary="Torch's fully_shard over gloo, with nothing of ttlaunch's around it.",
    config=TrainingFile,
    layouts=[Layout("fsdp2", worker=per("multihost_config.num_workers"))],
    flows=[("worker", "worker")],
    unread=["multihost_config.bucket_megabytes", "multihost_config.pipeline_parallel_config"],
)
