"""Make the failure of a run in which an audit found that a rank had computed wrong."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

from ttlaunch.planning.launch_plan import LaunchPlan, RankRow
from ttlaunch.running.audits import AuditWatch, Judgement, names_of, ranks_of
from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure, name_ranks


def audited_failure(plan: LaunchPlan, audits: AuditWatch) -> Failure | None:
    """Return the failure that an audit has found; None if all audits were clean.

    It names the rank that others contradict, or that contradicts itself. If nothing shows which of two ranks is wrong, it names both
    and blames neither.
    """
    rows = {row.rank: row for row in plan.ranks}
    hosts = {rank: row.host for rank, row in rows.items()}
    judgement = audits.judge(hosts)
    if judgement is None or not {judgement.block.owner, judgement.block.auditor} <= set(rows):
        return None
    step, two = judgement.block.step, [rows[rank] for rank in ranks_of(judgement.block)]
    make = partial(
        Failure,
        kind=Cause.AUDITED,
        step=step,
        time=time.time(),
        evidence=tuple(_evidence(judgement, hosts, clean=audits.clean)),
        comes_again=len(judgement.wrong) != 1 or len(set(hosts.values())) == 1,  # else it goes on without that host
    )
    if len(judgement.wrong) == 1:
        row = rows[judgement.wrong[0]]
        hint = f"test the memory and the processor of {row.host} before you use it again"
        return make(code="R089", rank=row.rank, role=row.role, host=row.host, cause=_cause(judgement), next_step=hint)
    if not judgement.wrong:
        ways = [judgement.block.computes.get(row.rank, "an unknown way") for row in two]
        cause = f"{_named(two)} round in different ways, {' and '.join(ways)}, so their gradients differ in step {step}"
        return make(code="R090", cause=cause, next_step="run on hosts that compute alike, or without `--audit`")
    hint = f"test the memory and the processor of {' and '.join(names_of(ranks_of(judgement.block), hosts))}"
    cause = f"{_named(two)} computed different gradients for {_what(judgement)} in step {step}"
    return make(code="R089", cause=cause, next_step=hint)


def _cause(judgement: Judgement) -> str:
    if judgement.against:
        return f"computed another gradient for {_what(judgement)} than {name_ranks(judgement.against, noun=_ranks(judgement.against))}"
    return f"computed {_what(judgement)} twice, with different gradients,"


def _evidence(judgement: Judgement, hosts: dict[int, str], *, clean: int | None) -> Iterator[str]:
    block = judgement.block
    yield f"rank {block.owner} computed it for the training, and rank {block.auditor} for an audit"
    if len(judgement.wrong) == 1 and judgement.against:
        if judgement.contradicts_itself:
            yield "when it computed again, it found what the others had found: the fault does not repeat"
        elif judgement.contradicts_itself is False:
            yield "when it computed again, it found the same: a part of its processor or its memory may be defective"
        if set(names_of(judgement.against, hosts)) & set(names_of(judgement.wrong, hosts)):
            yield "some of the ranks that contradict it are on the same host"
    elif len(judgement.wrong) > 1:
        yield "nobody else has decided between them, so nothing shows which one is right"
    yield "no audit before was clean" if clean is None else f"the last clean audit was that of step {clean}"


def _what(judgement: Judgement) -> str:
    return judgement.part or "the same micro-batches"


def _ranks(ranks: Sequence[int]) -> str:
    return "rank" if len(ranks) == 1 else "ranks"


def _named(rows: Sequence[RankRow]) -> str:
    return " and ".join(f"rank {row.rank} ({row.role}, {row.host})" for row in rows)
