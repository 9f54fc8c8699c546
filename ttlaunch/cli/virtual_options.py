"""The options that say what the machines and links of a virtual clock are like, for all commands that simulate on one."""

from typing import Annotated

import typer

ComputeMs = Annotated[
    float | None,
    typer.Option(
        "--compute-ms",
        min=1e-6,
        max=1e9,
        help="On a virtual clock: the time of the forward and backward pass of a micro-batch through the whole model. "
        "Default: 50 GFLOP/s.",
    ),
]
LinkUs = Annotated[
    float | None,
    typer.Option(
        "--link-us", min=0, max=1e9, help="On a virtual clock: how long a message travels.", show_default="50"
    ),
]
LinkGbps = Annotated[
    float | None,
    typer.Option(
        "--link-gbps",
        min=1e-6,
        max=1e9,
        help="On a virtual clock: what each rank can send, and receive, in Gbit/s.",
        show_default="10",
    ),
]
Slow = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="RANK=FACTOR", help="On a virtual clock: a rank that computes slower. Repeatable."),
]
SlowLink = Annotated[
    list[str] | None,
    typer.Option(
        "--slow-link", metavar="RANK=FACTOR", help="On a virtual clock: a rank whose port is slower. Repeatable."
    ),
]
