"""Read a plan of faults: statements of a verb, a target and a moment, between semicolons or on lines of their own.

    kill rank=2 at step=5; stop role=worker at step=9   # SIGKILL, SIGSTOP
    cut host=b at 10s

Each statement that cannot be parsed gives one mistake with its place; the other statements are parsed nevertheless.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ttlaunch.diagnostics import Blame, Diagnostic, Source, Span, did_you_mean, listed, shown
from ttlaunch.diagnostics.diagnostic import mistake_at
from ttlaunch.planning.faults import ALONE, NAMED, NUMBERED, VERBS_FOR, AtSecond, AtStep, Fault, Kind, Target, Verb

_WORD = re.compile(r"\S+")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_SECONDS = re.compile(r"([0-9]{1,6})(?:\.([0-9]{1,3}))?s\Z")
_MOMENTS = "`step=5`, or seconds after the start such as `10s`"
_TARGETS = [*(f"{kind}=N" for kind in NUMBERED), *(f"{kind}=NAME" for kind in NAMED), *ALONE]


@dataclass(frozen=True)
class _Word:
    text: str
    span: Span


class _Mistake(Exception):  # noqa: N818 - it never leaves this file
    """The reason why a statement cannot be parsed."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


def parse_faults(source: Source) -> tuple[list[Fault], list[Diagnostic]]:
    """Parse the faults of a plan in their order, with a diagnostic for every statement that is not a fault."""
    faults, found = [], []
    for words in _statements(source):
        try:
            faults.append(_parse_statement(words))
        except _Mistake as mistake:
            found.append(mistake.diagnostic)
    if not faults and not found:
        hint, blame = "a fault is written `kill rank=2 at step=5`", Blame.COMMAND_LINE
        found.append(mistake_at("P035", "the plan has no fault", source.start(), label="empty", hint=hint, blame=blame))
    return faults, found


def _statements(source: Source) -> Iterator[list[_Word]]:
    for number, line in enumerate(source.lines, start=1):
        begin = 0
        for part in line.partition("#")[0].split(";"):
            words = [
                _Word(match[0], source.span(number, begin + match.start() + 1, len(match[0])))
                for match in _WORD.finditer(part)
            ]
            if words:
                yield words
            begin += len(part) + 1


def _parse_statement(words: list[_Word]) -> Fault:
    first, rest = words[0], words[1:]
    verb = _parse_verb(first)
    target_word = first
    has_target = verb not in VERBS_FOR[Kind.RUN]
    if not has_target:
        target = Target(Kind.RUN)
    else:
        if not rest or rest[0].text == "at":
            raise _mistake(f"`{verb}` has no target", first, f"expected {listed(_TARGETS)} after it")
        target_word, rest = rest[0], rest[1:]
        target = _parse_target(target_word)
        _check_verb(verb, target, target_word)
    if not rest:
        previous = target_word.text if target_word is not first else str(verb)
        raise _mistake(f"`{shown(previous)}` is not followed by its time", target_word, f"expected `at` and {_MOMENTS}")
    if rest[0].text != "at":
        where = "a moment" if has_target else f"the moment of `{verb}`, which has no target,"
        raise _mistake(f"`{shown(rest[0].text)}` where {where} was expected", rest[0], f"expected `at` and {_MOMENTS}")
    if len(rest) == 1:
        raise _mistake("`at` is not followed by a moment", rest[0], f"expected {_MOMENTS}")
    if len(rest) > 2:  # noqa: PLR2004 - `at` and the moment
        message = f"`{shown(rest[2].text)}` after the end of a fault"
        raise _mistake(message, rest[2], "expected `;`", hint="faults are separated by `;`")
    return Fault(verb, target, _parse_moment(rest[1]), target_word.span, rest[1].span)


def _parse_verb(word: _Word) -> Verb:
    try:
        return Verb(word.text)
    except ValueError:
        message, hint = f"unknown fault `{shown(word.text)}`", "".join(did_you_mean(word.text, list(Verb)))
        raise _mistake(message, word, f"expected {listed(Verb)}", hint=hint) from None


def _parse_target(word: _Word) -> Target:
    name, equals, value = word.text.partition("=")
    if not equals and name in ALONE:
        return Target(Kind(name))
    if name in NUMBERED and _NUMBER.match(value):
        return Target(Kind(name), int(value))
    if name in NAMED and value:
        return Target(Kind(name), value)
    if equals and name in (*NUMBERED, *NAMED):
        wants = "a number" if name in NUMBERED else "a name"
        raise _mistake(f"`{shown(word.text)}` names no {name}", word, f"expected {wants} after `{name}=`")
    hint = "".join(did_you_mean(name, [*NUMBERED, *NAMED, *ALONE]))
    raise _mistake(f"unknown target `{shown(word.text)}`", word, f"expected {listed(_TARGETS)}", hint=hint)


def _check_verb(verb: Verb, target: Target, word: _Word) -> None:
    if verb in VERBS_FOR[target.kind]:
        return
    fit = [str(other) for other in Verb if other in VERBS_FOR[target.kind]]
    targets = [str(kind) for kind in Kind if verb in VERBS_FOR[kind]]
    message, hint = f"`{verb}` does not fit `{shown(word.text)}`", f"`{verb}` fits {listed(targets, last='and')}"
    raise _mistake(message, word, f"this target understands {listed(fit, last='and')}", hint=hint, code="P036")


def _parse_moment(word: _Word) -> AtStep | AtSecond:
    name, _, value = word.text.partition("=")
    if name == "step" and _NUMBER.match(value):
        if int(value) == 0:
            raise _mistake("`step=0` never comes", word, "steps are counted from 1")
        return AtStep(int(value))
    seconds = _SECONDS.match(word.text)
    if seconds:
        return AtSecond(int(seconds[1]) * 1000 + int((seconds[2] or "").ljust(3, "0")))
    hint = f"seconds are written `{word.text}s`" if _SECONDS.match(f"{word.text}s") else ""
    raise _mistake(f"`{shown(word.text)}` is not a time", word, f"expected {_MOMENTS}", hint=hint)


def _mistake(message: str, word: _Word, label: str, *, hint: str = "", code: str = "P035") -> _Mistake:
    return _Mistake(mistake_at(code, message, word.span, label=label, hint=hint, blame=Blame.COMMAND_LINE))
