"""The language of faults: what is read is what was meant, and every mistake has one diagnostic at its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.diagnostics import Format, Source, render
from ttlaunch.planning.fault_checks import FaultScope, check_faults, targets_of
from ttlaunch.planning.fault_parser import parse_faults
from ttlaunch.planning.faults import (
    NAMED,
    NUMBERED,
    VERBS_FOR,
    AtSecond,
    AtStep,
    Fault,
    Kind,
    Target,
    Verb,
    render_faults,
)
from ttlaunch.planning.launch_plan import RankRow

ROWS = (
    RankRow(0, "a", 0, "worker"),
    RankRow(1, "a", 1, "worker"),
    RankRow(2, "b", 0, "worker"),
    RankRow(3, "b", 1, "optimizer"),
)
HERE = FaultScope(tuple(RankRow(row.rank, "localhost", row.rank, row.role) for row in ROWS), is_here=True, last_step=60)
THERE = FaultScope(ROWS, is_here=False, last_step=60)


def read(text, *, name="--plan"):
    return parse_faults(Source(name, text))


def complaints(text, scope=THERE):
    faults, found = read(text)
    return [*found, *check_faults(faults, scope)]


def test_a_plan_is_read_word_by_word():
    faults, found = read("kill rank=2 at step=5; stop role=worker at 2.5s ;cut host=b at 10s;interrupt at step=7")
    assert [] == found
    assert [
        Fault(Verb.KILL, Target(Kind.RANK, 2), AtStep(5)),
        Fault(Verb.STOP, Target(Kind.ROLE, "worker"), AtSecond(2500)),
        Fault(Verb.CUT, Target(Kind.HOST, "b"), AtSecond(10_000)),
        Fault(Verb.INTERRUPT, Target(Kind.RUN), AtStep(7)),
    ] == faults


def test_a_file_may_have_lines_and_comments():
    faults, found = read("# twice\nkill mpirun at 1s  # SIGKILL\n\n kill shim=1 at step=2;\n", name="faults.txt")
    assert [] == found
    assert "kill mpirun at 1s; kill shim=1 at step=2" == render_faults(faults)


def known_faults():
    kinds = st.sampled_from([(verb, kind) for kind, verbs in VERBS_FOR.items() for verb in sorted(verbs)])
    moments = st.one_of(
        st.integers(1, 10**9 - 1).map(AtStep),
        st.integers(0, 10**9 - 1).map(AtSecond),
    )
    names = st.text(st.characters(exclude_characters=";#", exclude_categories=["Z", "C"]), min_size=1)
    return st.tuples(kinds, st.integers(0, 10**9 - 1), names, moments).map(as_fault)


def as_fault(drawn):
    (verb, kind), number, name, moment = drawn
    value = number if kind in NUMBERED else name if kind in NAMED else ""
    return Fault(verb, Target(kind, value), moment)


@given(st.lists(known_faults(), min_size=1))
def test_what_is_written_is_read_again_as_it_was(faults):
    assert (faults, []) == read(render_faults(faults))


WORDS = ["kill", "stop", "cut", "interrupt", "rank=", "rank=1", "role=worker", "host=b", "mpirun", "at", "step=5", "1s"]


@given(st.one_of(st.text(), st.lists(st.sampled_from([*WORDS, ";", "\n", "=", "#"])).map(" ".join)))
def test_no_text_breaks_the_reader_or_what_shows_its_complaints(text):
    faults, found = read(text)
    found = [*found, *check_faults(faults, THERE)]
    for form in Format:
        assert render(found, form=form) is not None
    statements = [part for line in text.split("\n") for part in line.partition("#")[0].split(";") if part.split()]
    assert max(1, len(statements)) == len(faults) + len([one for one in found if one.code in {"P035", "P036"}])


MISTAKES = {
    "kil rank=2 at step=5": ("P035", "unknown fault `kil`", 1, 3, "did you mean `kill`?"),
    "kill": ("P035", "`kill` has no target", 1, 4, None),
    "kill at step=5": ("P035", "`kill` has no target", 1, 4, None),
    "kill rank=two at step=5": ("P035", "`rank=two` names no rank", 6, 8, None),
    "kill role= at step=5": ("P035", "`role=` names no role", 6, 5, None),
    "kill rnk=2 at step=5": ("P035", "unknown target `rnk=2`", 6, 5, "did you mean `rank`?"),
    "kill rank=2": ("P035", "`rank=2` is not followed by its time", 6, 6, None),
    "interrupt": ("P035", "`interrupt` is not followed by its time", 1, 9, None),
    "kill rank=2 step=5": ("P035", "`step=5` where a moment was expected", 13, 6, None),
    "kill rank=2 at": ("P035", "`at` is not followed by a moment", 13, 2, None),
    "kill rank=2 at 5": ("P035", "`5` is not a time", 16, 1, "seconds are written `5s`"),
    "kill rank=2 at step=0": ("P035", "`step=0` never comes", 16, 6, None),
    "kill rank=2 at step=5 stop": ("P035", "`stop` after the end of a fault", 23, 4, "faults are separated by `;`"),
    " ; # nothing": ("P035", "the plan has no fault", 2, 11, "a fault is written `kill rank=2 at step=5`"),
    "cut rank=2 at step=5": ("P036", "`cut` does not fit `rank=2`", 5, 6, "`cut` fits `host`"),
    "kill rank=4 at step=5": ("P037", "`rank=4` is not in this run", 6, 6, None),
    "kill role=workers at 1s": ("P037", "`role=workers` is not in this run", 6, 12, "did you mean `worker`?"),
    "cut host=c at 1s": ("P037", "`host=c` is not in this run", 5, 6, None),
    "join at step=5": ("P037", "`join` needs a run whose workers come and go", 1, 4, "`--elastic MIN:MAX` lets them"),
    "leave rank=1 at 1s": (
        "P037",
        "`leave` needs a run whose workers come and go",
        7,
        6,
        "`--elastic MIN:MAX` lets them",
    ),
    "join rank=2 at 1s": ("P035", "`rank=2` where the moment of `join`, which has no target, was expected", 6, 6, None),
    "leave role=worker at 1s": ("P036", "`leave` does not fit `role=worker`", 7, 11, "`leave` fits `rank`"),
    "flip rank=1 at 1s": ("P038", "a bit flips after a step of a recipe", 16, 2, None),
    "flip role=worker at step=5": ("P036", "`flip` does not fit `role=worker`", 6, 11, "`flip` fits `rank`"),
    "kill rank=2 at step=61": ("P038", "`step=61` never comes", 16, 7, "`step=60` is the last"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_has_one_diagnostic_at_its_place(text):
    code, message, column, length, hint = MISTAKES[text]
    (found,) = complaints(text)
    span = found.primary.span
    assert (code, message, column, length) == (found.code, found.message, span.column, span.length)
    assert hint is None or (hint,) == found.hints


def test_a_mistake_is_shown_under_what_was_typed():
    assert (
        "error[P036]: `segv` does not fit `mpirun`\n"
        " --> --plan:1:29\n"
        "  |\n"
        "1 | kill rank=2 at step=5; segv mpirun at 1s\n"
        "  |                             ^^^^^^ this target understands `kill`\n"
        "\n"
        "hint: `segv` fits `rank`, `role` and `host`"
    ) == render(complaints("kill rank=2 at step=5; segv mpirun at 1s"))


@pytest.mark.parametrize("text", ["cut host=localhost at 1s", "kill agent=localhost at 1s"])
def test_a_run_on_one_machine_has_no_cable_to_cut(text):
    (found,) = complaints(text, HERE)
    what = text.removesuffix(" at 1s")
    assert ("P037", f"`{what}` needs a run over hosts") == (found.code, found.message)


def test_steps_before_a_checkpoint_and_steps_of_programs_never_come():
    (early,) = complaints("interrupt at step=5", FaultScope(ROWS, is_here=True, first_step=11, last_step=60))
    assert ("P038", "the run begins with step 11") == (early.code, early.primary.text)
    (program,) = complaints("interrupt at step=5", FaultScope(ROWS, is_here=True, takes_steps=False))
    assert ("P038", "only ranks of recipes report steps") == (program.code, program.primary.text)


def test_a_target_stands_for_its_ranks():
    faults, _ = read(
        "kill rank=2 at 1s; kill role=worker at 1s; kill host=b at 1s; cut host=b at 1s; kill mpirun at 1s"
    )
    assert [(2,), (0, 1, 2), (2, 3), (), ()] == [targets_of(fault, ROWS) for fault in faults]
