"""What `ttlaunch simulate --virtual --elastic` prints: the epochs, what each change of the members cost, and the verdict."""

from ttlaunch.cli.table import render_table
from ttlaunch.cli.virtual_view import render_machines, render_verdict
from ttlaunch.contract import worker_name
from ttlaunch.diagnostics import counted
from ttlaunch.lab.virtual_elastic import EpochTime, VirtualElasticRun
from ttlaunch.running.logs.fold import render_ranks

_EPOCHS = (
    "epoch",
    "after step",
    "at, s",
    "workers",
    "steps",
    "a step, ms",
    "bytes in it",
    "lost, ms",
    "anew",
    "because",
)
_WORKERS = ("worker", "started, s", "can take part, s", "got, bytes", "ended, s", "how")


def render_elastic(found: VirtualElasticRun) -> list[str]:
    """Render an elastic run: a line for each epoch, one for each worker that came or ended, and how the run would end."""
    workers = [
        (
            worker_name(number),
            f"{one.started_s:.3f}",
            "–" if one.ready_s is None else f"{one.ready_s:.3f}",
            f"{one.got:,}" if one.taken != [0, 0] else "–",
            "–" if one.gone_s is None else f"{one.gone_s:.3f}",
            one.why or ("was still starting when the run was over" if one.ready_s is None else ""),
        )
        for number, one in sorted(found.workers.items())
        if one.started_s or one.why
    ]
    come_and_go = ["", *render_table([_WORKERS, *workers], right=range(1, 5), indent="  ")] if workers else []
    return [
        _describe(found),
        *render_machines(found.conditions, found.plan),
        f"  a worker starts  in {found.start_s:g} s",
        "",
        *render_table([_EPOCHS, *map(_cells, found.epochs)], right={0, 1, 2, 4, 5, 6, 7, 8}, indent="  "),
        "",
        f"  bytes            {_bytes_verdict(found)}",
        *come_and_go,
        *(
            render_verdict(found.verdict)
            if found.verdict.faults
            else ["", f"  the run          done after {found.over_s:.3f} s"]
        ),
    ]


def _describe(found: VirtualElasticRun) -> str:
    limits = found.plan.elastic
    assert limits is not None  # noqa: S101 - the run is elastic
    number = str(limits.minimum) if limits.minimum == limits.maximum else f"{limits.minimum} to {limits.maximum}"
    steps = counted(found.steps, "step")
    doing = f"make each of {steps}"
    if limits.hands_out_tasks:
        doing = f"take part, and the first one hands each of {steps} to one of the others"
    return f"{counted(limits.first, 'worker')} {'starts' if limits.first == 1 else 'start'} on a virtual clock, {number} {doing}"


def _bytes_verdict(found: VirtualElasticRun) -> str:
    reasons = dict.fromkeys(one.no_formula for one in found.epochs if one.no_formula is not None)
    if reasons:
        return f"no formula, because {next(iter(reasons))}"
    if differing := sum(one.differing for one in found.epochs):
        return f"{counted(differing, 'pair')} sent other bytes than the formula says"
    if not all(one.is_counted for one in found.epochs):
        return "of each step, as the formula for members says; the time of a step is that of ranks that stay"
    return "of each step, exactly as the formula says"


def _cells(one: EpochTime) -> tuple[str, ...]:
    epoch = one.epoch
    sent = "–" if one.step_bytes is None or one.differing else f"{one.step_bytes:,}"
    lost = "–" if epoch.lost_s is None or not epoch.reasons else f"{epoch.lost_s * 1e3:.3f}"
    numbers = (
        str(epoch.epoch),
        str(epoch.step),
        f"{epoch.at_s:.3f}",
        render_ranks(list(epoch.members)),
        str(epoch.steps),
    )
    lost_steps = [f"{counted(epoch.lost_steps, 'step')} of its own lost"] if epoch.lost_steps else []
    again = [f"{counted(epoch.tasks_again, 'task')} handed out again"] if epoch.tasks_again else []
    because = "; ".join([*epoch.reasons, *lost_steps, *again]) or "the run began"
    return (*numbers, f"{one.step_ms:.3f}", sent, lost, str(epoch.computed_anew), because)
