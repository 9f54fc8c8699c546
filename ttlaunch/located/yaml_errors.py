"""Say what is wrong with a text that is not YAML in the words of someone who wants to repair it.

The parser speaks of tokens and indicators; the usual slips (a tab, a bracket never closed, two documents, a value with
a colon in it) get a sentence of their own, and everything else keeps the parser's words at the right place.
"""

import yaml

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.located.codes import FileCodes


def explain_syntax_error(error: yaml.MarkedYAMLError, source: Source, codes: FileCodes) -> Diagnostic:
    """The diagnostic for what PyYAML raised."""
    problem, context = error.problem or "", error.context or ""
    mark = _place(error.problem_mark or error.context_mark, source)
    opened = _place(error.context_mark, source) if error.context_mark else mark
    if "found another document" in problem:
        message = f"{source.name} holds two documents; one was expected"
        return Diagnostic(codes.syntax, message, Label(mark, "the second one begins here"))
    if "cannot start any token" in problem and source.line(mark.line)[mark.column - 1 :].startswith("\t"):
        text = "a tab; YAML indents with spaces"
        return Diagnostic(codes.syntax, f"{source.name} is not YAML: a tab indents line {mark.line}", Label(mark, text))
    if "cannot start any token" in problem:
        character = source.line(mark.line)[mark.column - 1 : mark.column]
        message = f"{source.name} is not YAML: a value begins with `{character}`"
        return Diagnostic(codes.syntax, message, Label(mark), hints=("put the value in quotes",))
    if "flow sequence" in context or "flow mapping" in context:
        bracket = "[" if "sequence" in context else "{"
        message = f"{source.name} is not YAML: `{bracket}` is not closed, or a comma is missing after an item"
        here = (Label(mark, "not understood any more from here"),) if mark != opened else ()
        return Diagnostic(codes.syntax, message, Label(opened, "opened here"), here)
    if "quoted scalar" in context and "end of stream" in problem:
        return Diagnostic(
            codes.syntax, f"{source.name} is not YAML: a quote is never closed", Label(opened, "opened here")
        )
    if "mapping values are not allowed" in problem:
        hint = "indent keys of one group alike; put a value that holds a colon in quotes"
        message = f"{source.name} is not YAML: a key is not possible here"
        return Diagnostic(codes.syntax, message, Label(mark), hints=(hint,))
    if "could not find expected ':'" in problem:
        message = f"{source.name} is not YAML: a key has no colon after it"
        return Diagnostic(codes.syntax, message, Label(opened, "expected `key: value`"))
    if "did not find expected key" in problem or "expected '-' indicator" in problem:
        message = f"{source.name} is not YAML: line {mark.line} does not go on with what line {opened.line} began"
        began = (Label(opened, "the group that begins here"),) if opened.line != mark.line else ()
        hint = "indent the keys, or the items, of one group alike"
        return Diagnostic(codes.syntax, message, Label(mark, "not indented like the rest"), began, hints=(hint,))
    words = shown(" ".join(part for part in (context, problem) if part)).replace("'", "`")
    return Diagnostic(codes.syntax, f"{source.name} is not YAML: {words}", Label(mark))


def _place(mark: yaml.Mark | None, source: Source) -> Span:
    """The mark's place; one at the end of the text moves back to the end of the last line that says something."""
    if mark is None:
        return source.start()
    offset = min(mark.index, len(source.text.rstrip()))
    line = source.text.count("\n", 0, offset) + 1
    return source.span(line, offset - source.text.rfind("\n", 0, offset))
