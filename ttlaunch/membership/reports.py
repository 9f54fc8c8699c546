"""What a worker writes into its records, as events of the coordinator."""

from ttlaunch.membership.messages import Answered, CutOff, Event, Member, Progressed, Registered, Seat, Share
from ttlaunch.membership.pulse import Beat
from ttlaunch.records.members import MemberReport

_MOST_NODES = 4096
"""The most nodes that an answer may list; a contiguous block has at most two for each power of two, and after changes a few more."""

_MOST_SHARES = 2
"""The slots of the former cut and those of the present one."""


def fields_of(event: Registered | Answered | Progressed | CutOff) -> dict[str, object]:
    """Return the fields of the record (`contract.KIND_MEMBER`) that reports an event of this worker."""
    own: dict[str, object]
    match event:
        case Registered(seat, applied, follows):
            own = {"applied": applied, "host": seat.host, "address": seat.address, "follows": follows}
            return {"what": "registered", "incarnation": seat.member.incarnation, **own}
        case Answered():
            own = {"held": event.held, "validated": event.validated}
            if event.shares:
                shares = [(share.cut, share.slots) for share in event.shares]
                own = {**own, "shares": shares, "is_ready": event.is_ready}
            common = {"epoch": event.epoch, "applied": event.applied, "is_done": event.is_done}
            return {"what": "answered", "incarnation": event.member.incarnation, **common, **own}
        case Progressed():
            common = {"epoch": event.epoch, "applied": event.applied, "is_done": event.is_done}
            return {"what": "progressed", "incarnation": event.member.incarnation, **common, "pace_s": event.pace_s}
        case CutOff(member, epoch, applied):
            return {"what": "cut off", "incarnation": member.incarnation, "epoch": epoch, "applied": applied}


def event_of(number: int, report: MemberReport) -> Event | None:
    """Return the event that a record of worker `number` stands for; None if it stands for none.

    The number is that of the file, or of the connection, by which the record came: a worker cannot speak for another one.
    """
    member = Member(number, report.incarnation)
    if report.what == "registered":
        return Registered(Seat(member, report.host, report.address), report.applied, report.follows)
    if report.what == "answered" and len(report.held) <= _MOST_NODES:
        shares = tuple(Share(cut, slots) for cut, slots in report.shares)
        if len(shares) > _MOST_SHARES or not all(share.is_possible for share in shares):
            return None
        return Answered(
            member,
            report.epoch,
            report.applied,
            held=tuple(report.held),
            validated=report.validated,
            is_done=report.is_done,
            shares=shares,
            is_ready=report.is_ready,
        )
    if report.what == "cut off":
        return CutOff(member, report.epoch, report.applied)
    if report.what == "progressed" and report.applied is not None:
        return Progressed(member, report.epoch, report.applied, report.pace_s, report.is_done)
    return None


def beat_of(report: MemberReport) -> Beat:
    """Return what a record says about the progress of its worker."""
    return Beat((report.applied or 0, *report.counts), report.waits, report.limit_s)
