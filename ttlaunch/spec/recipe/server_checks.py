"""Rules about parameter servers that no single type can say."""

from collections.abc import Iterator
from typing import Any

from ttlaunch.diagnostics import Severity
from ttlaunch.diagnostics.count import counted
from ttlaunch.spec.recipe.compression import pushes_are_compressed
from ttlaunch.spec.recipe.declare import Check, Layout, Problem


def servers_can_share_the_model(config: Any, layout: Layout) -> Iterator[Problem]:
    """The rules of `sync_ps_config`, but for its slow workers, and of how gradients travel to servers."""
    yield from pushes_are_compressed(config, layout)
    yield from _every_server_has_a_layer(config, layout)
    yield from _an_average_counts_some_weights(config, layout)


def _every_server_has_a_layer(config: Any, _layout: Layout) -> Iterator[Problem]:
    """Servers share the model by layers: embedding, blocks and head."""
    servers, blocks = config.sync_ps_config.num_servers, config.transformer_config.num_blocks
    if servers > blocks + 2:
        yield Problem(
            "C070",
            f"{servers} servers share {blocks + 2} layers; each needs at least one",
            "sync_ps_config.num_servers",
            "more than there are layers",
            others=(("transformer_config.num_blocks", f"embedding + {blocks} + head = {blocks + 2} layers"),),
            hints=(f"`--set sync_ps_config.num_servers={blocks + 2}`",),
        )


def _an_average_counts_some_weights(config: Any, _layout: Layout) -> Iterator[Problem]:
    """A warning where the average of the weights is configured, and never made."""
    servers = config.sync_ps_config
    if servers.polyak_decay is not None and servers.polyak_interval is None:
        yield Problem(
            "C062",
            f"`polyak_decay` is {servers.polyak_decay:g}, but without `polyak_interval` there is no average",
            "sync_ps_config.polyak_decay",
            "set, but without effect",
            hints=("`--set sync_ps_config.polyak_interval=10`",),
            severity=Severity.WARNING,
        )


def slow_workers_are_there(section: str) -> Check:
    """Every worker that `slow_workers` of a section names is one.

    Args:
        section: The section's name.
    """

    def check(config: Any, layout: Layout) -> Iterator[Problem]:
        workers = layout.counts(config).get("worker", 0)
        missing = [place for place in getattr(config, section).slow_workers if place >= workers]
        if workers and missing:
            yield Problem(
                "C061",
                f"`slow_workers` slows worker {missing[0]}, and there are {counted(workers, 'worker')}",
                f"{section}.slow_workers",
                f"expected 0 to {workers - 1}" if workers > 1 else "expected 0",
            )

    return check


def gradients_may_be_stale(config: Any, _layout: Layout) -> Iterator[Problem]:
    """What needs all ranks to be in the same step."""
    training = config.training_config
    if training.precision == "fp16":
        yield Problem(
            "C072",
            "`precision` is fp16, whose loss scale changes from step to step",
            "training_config.precision",
            "a stale gradient has another scale than the server's",
            hints=("`--set training_config.precision=bf16`",),
        )
    if training.early_stop_patience is not None:
        yield Problem(
            "C073",
            "`early_stop_patience` is set, but training does not wait for its validations here",
            "training_config.early_stop_patience",
            "after which step it would end is chance",
            hints=("`--set training_config.early_stop_patience=null`",),
        )
