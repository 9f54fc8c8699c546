"""What the synchronous parameter server is: its configuration, its roles, who talks to whom. No torch: the launcher reads it."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ttlaunch.recipe import (
    Audited,
    Bits,
    CompressionConfig,
    Elastic,
    Layout,
    Naive,
    Recipe,
    Section,
    TrainingFile,
    all_pairs,
    every_worker_has_a_micro_batch,
    per,
    servers_can_share_the_model,
    slow_workers_are_there,
)

from .traffic import members_traffic, shadow_bytes, traffic


class SyncPsConfig(Section):
    """How many servers there are, what they do about late workers, and which average of the weights they keep."""

    num_servers: Annotated[PositiveInt, Bits.FREE, Bits.SENDERS] = Field(
        1, description="ranks that share the parameters and their state, by layers"
    )
    straggler: Literal["wait", "drop", "fail"] = Field("wait", description="for late workers; or do without; or end")
    straggler_timeout_s: Annotated[PositiveFloat, Bits.FREE] = Field(
        30.0, description="after the last that came; then others are late"
    )
    polyak_interval: PositiveInt | None = Field(None, description="steps between weights that their average counts")
    polyak_decay: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="share of the average that stays when further weights count; null: all count alike"
    )
    slow_workers: Annotated[dict[NonNegativeInt, Annotated[float, Field(ge=1, le=1000)]], Bits.FREE] = Field(
        default={}, description="for experiments: workers by place, and how many times as long their passes take"
    )


class Config(TrainingFile):
    """The sections every recipe shares, the servers, and in how few bytes gradients travel to them."""

    sync_ps_config: SyncPsConfig = SyncPsConfig()
    compression_config: CompressionConfig = CompressionConfig()


RECIPE = Recipe(
    summary="Servers average fresh gradients of all workers, update their part of the weights and send it back.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("sync_ps", worker=per("multihost_config.num_workers"), server=per("sync_ps_config.num_servers")),
    ],
    flows=[("worker", "server"), all_pairs("server")],
    checks=[every_worker_has_a_micro_batch, servers_can_share_the_model, slow_workers_are_there("sync_ps_config")],
    unread=["multihost_config.pipeline_parallel_config", "multihost_config.bucket_megabytes"],
    traffic=traffic,
    same_on_resume=["sync_ps_config.polyak_interval"],
    naive=Naive(
        [Layout("naive", worker=per("multihost_config.num_workers"), server=1)],
        only={"compression_config.kind": "none", "sync_ps_config.straggler": "wait"},
    ),
    # One server has a worker as its shadow; two are each other's. What a lossy codec still owes would be lost with its rank.
    elastic=Elastic(
        Layout("members", member=per("multihost_config.num_workers", plus="sync_ps_config.num_servers")),
        only={
            "sync_ps_config.num_servers": (1, 2),
            "sync_ps_config.straggler": "wait",
            "compression_config.kind": "none",
        },
        slots=per("sync_ps_config.num_servers"),
        servers=per("sync_ps_config.num_servers"),
        as_roles=["server"],
        shadow_bytes=shadow_bytes,
        traffic=members_traffic,
    ),
    audited=Audited("worker", only={"sync_ps_config.straggler": ("wait", "fail")}),
)
