"""Ways to break the protocol of elastic runs, each one function in the place of the right one, and where each is found out."""

from collections.abc import Callable
from dataclasses import replace

from tests.membership.process import Kind, Process, Rules, Work, take_the_state
from tests.membership.world import Budget, Setting
from ttlaunch.membership import coordinator
from ttlaunch.membership.coordinator import Result
from ttlaunch.membership.coordinator_state import Coordinator
from ttlaunch.membership.messages import Answered, Begin, Dismiss, Event, Share
from ttlaunch.membership.numbered import Numbered
from ttlaunch.membership.worker import WorkerState


def keep_what_arrived(process: Process) -> Process:
    """Keep what others have sent of a step that was interrupted, as a sum on arrival does."""
    return process


def accept_every_epoch(process: Process, frame: object) -> bool:
    """Accept frames of any epoch."""
    del process, frame
    return True


def apply_at_once(process: Process, buckets: int) -> bool:
    """Go on to the next step although others still need something of this one."""
    del process, buckets
    return True


def forget_when_sending(process: Process, kind: Kind) -> bool:
    """Use the memory of a mean again for the first sum of the next step."""
    del process
    return kind is Kind.NODES


def change_begin(change: Callable[[Begin, dict[int, Answered]], Begin]) -> Callable[..., Result]:
    def step(state: Coordinator, *events: Event) -> Result:
        after, orders = coordinator.step(state, *events)
        answers = dict(state.answers)
        for event in events:
            if isinstance(event, Answered) and event.epoch == state.epoch:
                answers[event.member.number] = event
        began = after.begin
        if began is None or began == state.begin:
            return after, orders
        order = change(began, answers)
        orders = [replace(one, message=order) if one.message == began else one for one in orders]
        return replace(after, begin=order), orders

    return step


def start_from_the_smallest(order: Begin, answers: dict[int, Answered]) -> Begin:
    """Let an epoch start from the smallest step that a member has applied."""
    steps = {number: answers[number].applied for number in order.numbers}
    known = [step for step in steps.values() if step is not None]
    holders = tuple(number for number, step in steps.items() if step is not None)
    behind = tuple((number, step) for number, step in steps.items() if step is None)
    return replace(order, applied=min(known), holders=holders, behind=behind)


def keep_every_node(order: Begin, answers: dict[int, Answered]) -> Begin:
    """Count all nodes that members hold."""
    kept = tuple(answers[number].held if number in order.holders else () for number in order.numbers)
    return replace(order, kept=kept)


def tell_nobody(state: Coordinator, *events: Event) -> Result:
    """Do not tell those that others have gone on without."""
    after, orders = coordinator.step(state, *events)
    return after, [order for order in orders if not isinstance(order.message, Dismiss)]


def bring_back(state: Coordinator, *events: Event) -> Result:
    """Forget which incarnations were counted as lost."""
    return coordinator.step(replace(state, seen=Numbered(dict.fromkeys(state.seen, -1))), *events)


def validate_again(state: WorkerState) -> WorkerState:
    """Do not note that what follows a step was done by those from which the weights come."""
    assert state.begin is not None
    return replace(state, applied=state.begin.applied, held=())


def remember_who_was_done(state: Coordinator, event: Event) -> Result:
    """Count who was done in the epoch before as done in this one."""
    after, orders = coordinator.step(state, event)
    if after.begin is not None and after.begin != state.begin:
        for number in after.members:
            if (before := state.workers.get(number)) is not None and before.is_done:
                after = replace(after, workers=after.workers.put(number, before), done=after.done + 1)
    return after, orders


def say_the_next_step(process: Process, step: int) -> Process:
    """Have the weights of a step, and say that they are those of the next."""
    taken = take_the_state(process, step)
    return replace(taken, state=replace(taken.state, applied=step + 1, validated=step + 1), ended=step + 1)


def apply_when_ready(process: Process) -> bool:
    """Make an update before the others have said that they could make it, too."""
    return process.state.applied is None


def keep_own(share: Share) -> Share:
    """Keep only the slot that a process owns."""
    return replace(share, slots=share.slots[:1])


def give_up_former_slots(state: WorkerState, share: Share) -> WorkerState:
    """Give the slots of the former cut up before all members have got those of the new one."""
    return replace(state, shares=(share,))


def begin_without_slots(state: Coordinator, event: Event) -> Result:
    """Begin an epoch from the largest step that a member has applied, whoever has the slots."""
    right = coordinator._have_state
    coordinator._have_state = lambda *_: True
    try:
        return coordinator.step(state, event)
    finally:
        coordinator._have_state = right


def count_nobody_as_ready(state: Coordinator, event: Event) -> Result:
    """Count only the slots of members that have applied the step from which an epoch starts."""
    return coordinator.step(state, replace(event, is_ready=False) if isinstance(event, Answered) else event)


_SUSPECTED = Setting(budget=Budget(suspicions=1))
_TOGETHER = Setting(minimum=2, budget=Budget(suspicions=1))
_LONGER = Setting(
    workers=3, maximum=3, work=Work(micro_batches=3, steps=2), budget=Budget(suspicions=1), comes_again=False
)
_THREE = Setting(workers=3, maximum=3, work=Work(micro_batches=3), budget=Budget(crashes=1), comes_again=False)
_CHANGING = Setting(workers=1, budget=Budget(joins=1, leaves=1))
_COMING = Setting(workers=1, work=Work(steps=2), budget=Budget(joins=1))
_CUT = Setting(workers=3, maximum=3, work=Work(micro_batches=3, slots=0), budget=Budget(crashes=1))
_CUT_TWICE = replace(_CUT, budget=Budget(crashes=2))
_CUT_ANEW = replace(_CUT, workers=2, budget=Budget(crashes=1, joins=1), follows=False)

MUTANTS: dict[str, tuple[Rules, Setting, str]] = {
    "sum on arrival": (Rules(interrupt=keep_what_arrived), _SUSPECTED, "does not sum each leaf"),
    "no fence": (Rules(accepts=accept_every_epoch), _SUSPECTED, "does not sum each leaf"),
    "no R1: applies before all is on its way": (Rules(may_apply=apply_at_once), Setting(), "no longer finish"),
    "starts from the smallest step": (Rules(step=change_begin(start_from_the_smallest)), _SUSPECTED, "is skipped"),
    "no R3: the evicted are not told": (Rules(step=tell_nobody), _TOGETHER, "no longer finish"),
    "kept nodes count twice": (Rules(step=change_begin(keep_every_node)), _SUSPECTED, "not each leaf once"),
    "a mean is forgotten too early": (Rules(forgets_mean=forget_when_sending), _LONGER, "forgotten"),
    "who was done stays so": (Rules(step=remember_who_was_done), _THREE, "told before it has done"),
    "the lost come back": (Rules(step=bring_back), Setting(budget=Budget(crashes=1)), "which is lost"),
    "registers with a step that it lacks": (Rules(follow=say_the_next_step), _COMING, "and counts as one with"),
    "applies before all are ready": (Rules(awaits_all=apply_when_ready), _CUT, "no longer finish"),
    "who is ready does not count": (Rules(step=count_nobody_as_ready), _CUT, "no longer finish"),
    "slots have no shadow": (Rules(keeps=keep_own), _CUT, "no longer finish"),
    "begins without a slot": (Rules(step=begin_without_slots), _CUT_TWICE, "nobody has some slot"),
    "former slots are given up at once": (Rules(take_share=give_up_former_slots), _CUT_ANEW, "is given up"),
    "a validation is made twice": (Rules(catch_up=validate_again), _CHANGING, "made again"),
}
"""By name: the rules, where they are found out, and what the broken rule says."""


def setting_of(name: str) -> Setting:
    """Return the setting in which a mutant is found out, with its rules."""
    rules, setting, _ = MUTANTS[name]
    return replace(setting, work=replace(setting.work, rules=rules))
