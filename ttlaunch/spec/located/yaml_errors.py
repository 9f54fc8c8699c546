"""Explain YAML syntax errors in terms of the repair.

PyYAML's messages speak of tokens and indicators. The usual mistakes (a tab, a bracket that is never closed, two documents, a
value that contains a colon) each have their own messages; all other errors show PyYAML's message.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import yaml

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import FileCodes


def explain_syntax_error(error: yaml.MarkedYAMLError, source: Source, codes: FileCodes) -> Diagnostic:
    """Return the diagnostic for an error that PyYAML raised."""
    text = ": ".join(part for part in (error.context, error.problem) if part)
    here = _place(error.problem_mark or error.context_mark, source)
    stop = _Stop(here, _place(error.context_mark, source) if error.context_mark else here)
    explanation = next((explain(stop) for phrase, explain in _EXPLANATIONS if phrase in text), None)
    if explanation is None:
        explanation = _Explanation(shown(text, longest=_LONGEST_TEXT).replace("'", "`"), Label(here))
    message = (
        f"{source.name} {explanation.what}" if explanation.is_yaml else f"{source.name} is not YAML: {explanation.what}"
    )
    return Diagnostic(
        codes.syntax,
        message,
        explanation.place,
        explanation.others,
        hints=(explanation.hint,) if explanation.hint else (),
    )


_LONGEST_TEXT = 160


@dataclass(frozen=True)
class _Stop:
    """Where the parser stopped, and where the value that it was reading began."""

    here: Span
    began: Span

    @property
    def rest(self) -> str:
        return self.here.source.line(self.here.line)[self.here.column - 1 :]


@dataclass(frozen=True)
class _Explanation:
    what: str
    place: Label
    others: tuple[Label, ...] = ()
    hint: str = ""
    is_yaml: bool = False


def _strange_character(stop: _Stop) -> _Explanation:
    if stop.rest.startswith("\t"):
        return _Explanation(f"a tab indents line {stop.here.line}", Label(stop.here, "a tab; YAML indents with spaces"))
    return _Explanation(f"a value begins with `{stop.rest[:1]}`", Label(stop.here), hint=_QUOTES)


def _unclosed_bracket(stop: _Stop) -> _Explanation:
    began = stop.began
    if stop.rest[:1] in {"]", "}"} and began == stop.here:
        return _missing_value(stop)
    if _character_at(began) not in {"[", "{"}:
        began = _last_open(began.source) or began  # the parser marks the missing item, not the bracket
    stopped = (Label(stop.here, "the parser stopped here"),) if stop.here not in {stop.began, began} else ()
    what = f"`{_character_at(began)}` is not closed, or a comma is missing after an item"
    return _Explanation(what, Label(began, "opened here"), stopped)


def _character_at(span: Span) -> str:
    return span.source.line(span.line)[span.column - 1 : span.column]


def _last_open(source: Source) -> Span | None:
    """Return the last bracket that is not closed, as far as the text can be tokenized."""
    opened = []
    with suppress(yaml.YAMLError):
        for token in yaml.scan(source.text):
            if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
                opened.append(token.start_mark)
            elif isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken):
                del opened[-1:]
    return _place(opened[-1], source) if opened else None


def _broken_group(stop: _Stop) -> _Explanation:
    what = f"line {stop.here.line} does not fit the group that begins in line {stop.began.line}"
    began = (Label(stop.began, "the group that begins here"),) if stop.began.line != stop.here.line else ()
    hint = "indent the keys, or the items, of one group alike"
    return _Explanation(what, Label(stop.here, "not indented like the rest"), began, hint)


def _unknown_escape(stop: _Stop) -> _Explanation:
    # libyaml marks the backslash.
    what = f"`{stop.rest[:2]}` means nothing in double quotes"
    return _Explanation(what, Label(stop.here), hint="use single quotes, or write `\\\\`")


def _missing_value(stop: _Stop) -> _Explanation:
    return _Explanation(f"found `{stop.rest[:1]}` where a value was expected", Label(stop.here))


def _fixed_explanation(
    what: str, *, label: str = "", hint: str = "", is_at_start: bool = False
) -> Callable[[_Stop], _Explanation]:
    """Return an explanation with a fixed text, in which `{rest}` stands for the next character."""

    def explain(stop: _Stop) -> _Explanation:
        place = Label(stop.began if is_at_start else stop.here, label)
        return _Explanation(what.replace("{rest}", stop.rest[:1]), place, hint=hint)

    return explain


def _two_documents(stop: _Stop) -> _Explanation:
    label = Label(stop.here, "the second one begins here")
    return _Explanation("holds two documents; one was expected", label, is_yaml=True)


_QUOTES = "put the value in quotes"
_INDENT = "indent keys of one group alike; put a value that holds a colon in quotes"
_EXPLANATIONS: tuple[tuple[str, Callable[[_Stop], _Explanation]], ...] = (
    ("found another document", _two_documents),
    ("cannot start any token", _strange_character),
    ("while parsing a flow", _unclosed_bracket),
    (
        "quoted scalar: found unexpected end",
        _fixed_explanation("a quote is never closed", label="opened here", is_at_start=True),
    ),
    ("mapping values are not allowed", _fixed_explanation("a key is not allowed here", hint=_INDENT)),
    (
        "could not find expected ':'",
        _fixed_explanation("a key has no colon after it", label="expected `key: value`", is_at_start=True),
    ),
    ("did not find expected key", _broken_group),
    ("expected '-' indicator", _broken_group),
    ("undefined alias", _fixed_explanation("`*` refers to an anchor that is not defined", hint=_QUOTES)),
    ("unknown escape", _unknown_escape),
    ("expected node content", _missing_value),
)
"""Phrases of PyYAML's messages, each with the function that explains the mistake; the first match wins."""


def _place(mark: yaml.Mark | None, source: Source) -> Span:
    """Return the place of a mark; a mark at the end of the text is moved back to the last visible character."""
    if mark is None:
        return source.start()
    offset = min(mark.index, len(source.text.rstrip()))
    line = source.text.count("\n", 0, offset) + 1
    return source.span(line, offset - source.text.rfind("\n", 0, offset))
