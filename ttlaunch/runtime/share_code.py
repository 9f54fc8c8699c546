"""Which ranks have the same code and shares of unequal size, whose code runs for all, and which one of each class has a clock."""

from collections.abc import Callable, Hashable, Mapping, Sequence

from torch import Tensor

from ttlaunch.runtime.alike import first_classes
from ttlaunch.runtime.comm.class_programs import ClassPrograms, classes_of_shares, follow
from ttlaunch.runtime.comm.class_world import ClassWorld
from ttlaunch.runtime.comm.few_authors import FewAuthors
from ttlaunch.runtime.comm.programs import Step
from ttlaunch.runtime.comm.share_rules import Code, Forms, Section, sections_of
from ttlaunch.runtime.comm.turns import Script
from ttlaunch.runtime.comm.virtual_world import Classes
from ttlaunch.runtime.hollow import Found
from ttlaunch.runtime.same_code import Live, author_of
from ttlaunch.runtime.timed_steps import TimedSteps
from ttlaunch.runtime.world import Rank

_LEAST = 4
"""The code of three ranks of a group runs, so smaller groups gain nothing."""
_MOST_ROUNDS = 4
"""So often, more code runs of ranks with messages that no other one has; what then is not known shows in messages that do not match."""


def programs_of_shares(
    roles: Sequence[str],
    differences: Sequence[Hashable],
    others: Mapping[Rank, Hashable],
    *,
    live: Live,
    carries: Callable[[Tensor], bool],
    flops_per_s: float,
    known: dict[Hashable, Found],
) -> tuple[Classes, ClassPrograms]:
    """Run the code of some ranks, and find the classes of all ranks and what each does.

    Args:
        roles: The role of each rank.
        differences: What makes ranks of a role have other code: their shares of the data.
        others: What else makes a rank take other times, such as how slow it is.
        live: Runs the code of a rank.
        carries: Whether the values of a tensor matter.
        flops_per_s: How many floating-point operations a rank that is not slow computes in a second.
        known: What operations return.

    Raises:
        NotAlikeError: No rule says what ranks do whose code does not run.

    Cost: the code of one rank of small groups, of three of each large one, and of more where these three leave out messages that others have.
    """
    groups, forms = first_classes(roles, differences), Forms()
    few, written = FewAuthors(groups), dict[Rank, Sequence[Section]]()
    chosen = [ranks if len(ranks) < _LEAST else (ranks[0], ranks[len(ranks) // 2], ranks[-1]) for ranks in groups]
    more = [rank for ranks in chosen for rank in ranks]
    for _ in range(_MOST_ROUNDS):
        authors = {rank: author_of(rank, live, carries=carries, flops_per_s=flops_per_s, known=known) for rank in more}
        try:
            few.run(authors)
        finally:
            for author in authors.values():
                author.close()
        for rank in more:
            written[rank] = sections_of(authors[rank], forms)
            authors.pop(rank).deeds.clear()  # a million, which nobody reads any more
        codes = [_code_of(ranks, written, roles) for ranks in groups]
        more = [rank for code in codes for rank in code.not_covered()]
        if not more:
            break
    classes = classes_of_shares(codes, others)
    return classes, ClassPrograms(codes, classes, forms)


def _code_of(ranks: Sequence[Rank], written: Mapping[Rank, Sequence[Section]], roles: Sequence[str]) -> Code:
    """Return the code of a group, from what some of its ranks do."""
    role = [Rank(rank) for rank, name in enumerate(roles) if name == roles[ranks[0]]]
    return Code(ranks, {rank: written[rank] for rank in ranks if rank in written}, role=role, size=len(roles))


def run_programs(programs: ClassPrograms, world: ClassWorld, timed: Mapping[Rank, TimedSteps]) -> None:
    """Let the first rank of each class do what its program says, at its times.

    Args:
        programs: The programs of all classes.
        world: Where these ranks live.
        timed: What notes the steps of each, in the order of the classes.

    Raises:
        NotAlikeError: Messages do not match, so ranks do not do what their programs say.
    """
    world.run(
        {rank: _script(programs, place, rank, world=world, timed=timed[rank]) for place, rank in enumerate(timed)}
    )


def _script(programs: ClassPrograms, place: int, rank: Rank, *, world: ClassWorld, timed: TimedSteps) -> Script:
    def step(deed: Step) -> None:
        if deed.begins:
            timed.begin_step(deed.step)
        else:
            timed.end_step(deed.step)

    def note(facts: Mapping[str, int]) -> None:
        timed.traffic.note(**facts)

    yield from follow(programs.of(place), place, rank, world=world, step=step, note=note)
    timed.end = "done"
