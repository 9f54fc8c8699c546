"""Read protocol buffers' text format into a tree in which every field and value knows its line and column.

It reads everything that mesh graph descriptors use: `field: value`, `field { … }` with or without a colon, `< … >`
for braces, lists, strings in either quote with escapes, numbers, words, comments, `,` or `;` after a field. It does
not know what a field means or how often it may occur. Extensions and `Any` are refused.

Source: Protocol Buffers Documentation, "Text Format Language Specification".
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import FileCodes
from ttlaunch.spec.located.nodes import ScalarNode

_TOKEN = re.compile(
    r"""(?>[ \t\n\r\f\v]+|\#[^\n]*)*+(?:
    (?P<word>[A-Za-z_][A-Za-z0-9_]*)|
    (?P<number>[-+]?(?>0[xX][0-9a-fA-F]+|(?>[0-9]+\.?[0-9]*|\.[0-9]+)(?>[eE][-+]?[0-9]+)?)[fF]?+(?![A-Za-z0-9_.]))|
    (?P<mark>[{}<>\[\]:,;])|
    (?P<string>"(?>[^"\\\n]+|\\.)*+"|'(?>[^'\\\n]+|\\.)*+')|
    (?P<other>.))""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(
    r"""\\(?:(?P<octal>[0-7]{1,3})|[xX](?P<hex>[0-9a-fA-F]{1,2})|u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|(?P<plain>.))""",
    re.DOTALL,
)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_PLAIN |= {character: character for character in "\\'\"?"}
_CLOSING = {"{": "}", "<": ">"}
_DEEPEST = 60
_MOST_VALUES = 500_000
_MOST_TOKENS = 2_000_000
_MOST_DIGITS = 300
_LARGEST_CHARACTER = 0x10FFFF


@dataclass(slots=True)
class Message:
    """A group of fields in the order of the file. The span is its opening brace; of the whole file, its first line."""

    span: Span
    fields: "list[Field]"


@dataclass(slots=True)
class Field:
    """One value of a field; each item of a list is a `Field` too.

    Attributes:
        span: The place of the field's name.
        in_list: Whether the value is an item of `[ … ]`; an empty list is one `Field` without a value.
    """

    name: str
    span: Span
    value: ScalarNode | Message | None
    in_list: bool = False


def parse_textproto(source: Source, *, codes: FileCodes) -> tuple[Message | None, list[Diagnostic]]:
    """Parse the text of a file.

    Returns:
        The tree, or None with one diagnostic at the first place that is not text format.
    """
    parser = _Parser(source)
    try:
        fields = parser.fields("", None, 1)
    except _SyntaxError as error:
        name = source.name
        message = f"{name} {error.what}" if error.is_format else f"{name} is not text format: {error.what}"
        hints = (error.hint,) if error.hint else ()
        return None, [Diagnostic(codes.syntax, message, error.place, error.others, hints=hints)]
    if not fields:
        return None, [Diagnostic(codes.empty_file, f"{source.name} holds nothing but comments")]
    return Message(source.start(), fields), []


class _SyntaxError(Exception):
    def __init__(
        self, what: str, place: Label, *, others: tuple[Label, ...] = (), hint: str = "", is_format: bool = False
    ) -> None:
        super().__init__(what)
        self.what, self.place, self.others, self.hint, self.is_format = what, place, others, hint, is_format


class _Parser:
    """Parses the text in one pass; `kind`, `lexeme`, `start` and `end` describe the next token."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.text = source.text
        self.values = 0
        self.line_starts = [0, *accumulate(len(line) + 1 for line in source.lines)]
        self.line, self.next_line = 1, 0
        self.end, self.tokens = 0, 0
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.end)
        if match is None or match.lastgroup is None:
            self.kind, self.lexeme, self.start = "end", "", len(self.text)
            return
        self.kind, self.lexeme = match.lastgroup, match[match.lastgroup]
        self.start, self.end = match.start(match.lastgroup), match.end()
        self.tokens += 1
        if self.tokens > _MOST_TOKENS:  # pieces of one string are no values
            span = self.span(self.start, len(self.lexeme))
            raise _SyntaxError(
                f"holds more than {_MOST_TOKENS} words, marks and pieces of texts", Label(span), is_format=True
            )

    def next_is(self, marks: str) -> bool:
        """Return whether the next token is one of these marks."""
        return self.kind == "mark" and self.lexeme in marks

    def span(self, start: int, length: int) -> Span:
        first = self.line_starts[self.line - 1]
        # Tokens come in order, so nearly every one is on the line of the token before and needs no search.
        if not first <= start < self.next_line:
            self.line = bisect_right(self.line_starts, start)
            first = self.line_starts[self.line - 1]
            self.next_line = first + len(self.source.lines[self.line - 1]) + 1
        return Span(self.source, self.line, start - first + 1, length)

    def here(self) -> Span:
        """Return the next token's place; at the end of the text, that of the last character that is not white space."""
        if self.kind != "end":
            return self.span(self.start, max(1, len(self.lexeme)))
        return self.span(max(0, len(self.text.rstrip()) - 1), 1)

    def fields(self, closing: str, opened: Span | None, depth: int) -> list[Field]:
        """Read the fields up to the closing mark, which stays the next token."""
        found: list[Field] = []
        while not (self.kind == "end" if opened is None else self.lexeme == closing and self.kind == "mark"):
            if self.kind == "end" and opened is not None:
                what = f"a group that line {opened.line} opens is never closed"
                raise _SyntaxError(what, Label(opened, f"needs `{closing}`"))
            if self.kind != "word":
                raise self._no_field()
            self.field(found, depth)
            if self.next_is(",;"):
                self.advance()
        return found

    def field(self, found: list[Field], depth: int) -> None:
        name, span = self.lexeme, self.span(self.start, len(self.lexeme))
        self.advance()
        colon = self.next_is(":")
        if colon:
            self.advance()
        if self.next_is("{<"):
            found.append(Field(name, span, self.message(depth)))
        elif not colon and not self.next_is("["):
            what = f"`{shown(name)}` has no colon and no braces after it"
            raise _SyntaxError(what, Label(span, f"expected `{shown(name)}: …` or `{shown(name)} {{ … }}`"))
        elif self.next_is("["):
            self.list(Field(name, span, None, in_list=True), found, depth, has_colon=colon)
        else:
            found.append(Field(name, span, self.scalar(name)))

    def message(self, depth: int) -> Message:
        opened, closing = self.span(self.start, 1), _CLOSING[self.lexeme]
        if depth >= _DEEPEST:
            raise _SyntaxError(f"is nested more than {_DEEPEST} levels deep", Label(opened), is_format=True)
        self._count(opened)
        self.advance()
        fields = self.fields(closing, opened, depth + 1)
        self.advance()
        return Message(opened, fields)

    def list(self, field: Field, found: list[Field], depth: int, *, has_colon: bool) -> None:
        """Read the items of a list, each as a field like `field`; an empty list is the field without a value."""
        opened = self.span(self.start, 1)
        self.advance()
        if self.next_is("]"):
            found.append(field)
            self.advance()
            return
        while True:
            if not self.next_is("{<") and not has_colon:
                message = f"`{shown(field.name)}` has no colon before its list"
                raise _SyntaxError(message, Label(opened, "expected `: [`"))
            found.append(replace(field, value=self.message(depth) if self.next_is("{<") else self.scalar(field.name)))
            is_last = not self.next_is(",")
            if is_last and not self.next_is("]"):
                others = (Label(opened, "the list opened here"),) if opened.line != self.here().line else ()
                what = "a list is not closed, or a comma is missing after an item"
                raise _SyntaxError(what, Label(self.here(), "expected `,` or `]`"), others=others)
            self.advance()
            if is_last:
                return

    def scalar(self, name: str) -> ScalarNode:
        kind, lexeme, start = self.kind, self.lexeme, self.start
        span = self.here()
        self._count(span)
        if kind == "string":
            return self.string(span)
        self.advance()
        if kind == "word":
            return ScalarNode(span, lexeme, quoted=False, text=lexeme)
        if kind == "number":
            return ScalarNode(span, self.number(lexeme, span), quoted=False, text=lexeme)
        if kind == "end" or lexeme in ("}", ">", "]", ",", ";", ":"):
            raise _SyntaxError(f"`{shown(name)}` has no value", Label(span, "expected a value before this"))
        raise self._strange(lexeme, span, start)

    def string(self, span: Span) -> ScalarNode:
        """Read a text; consecutive strings are joined."""
        parts, written = [], self.text[self.start + 1 : self.end - 1]
        while self.kind == "string":
            parts.append(self.unescaped(self.lexeme[1:-1], self.start + 1))
            self.advance()
        return ScalarNode(span, "".join(parts), quoted=True, text=written if len(parts) == 1 else "".join(parts))

    def unescaped(self, text: str, start: int) -> str:
        """Return the text with its escapes replaced; bytes that are not UTF-8 become replacement characters."""
        data, end = bytearray(), 0
        for match in _ESCAPE.finditer(text):
            data += text[end : match.start()].encode()
            end = match.end()
            code = match["octal"] or match["hex"]
            character = _character(match)
            if code:
                data.append(int(code, 8 if match["octal"] else 16) & 0xFF)
            elif character is not None:
                data += character.encode()
            else:
                place, hint = (
                    Label(self.span(start + match.start(), len(match.group()))),
                    "write `\\\\` for a backslash",
                )
                raise _SyntaxError(f"`{shown(match.group())}` means nothing in a string", place, hint=hint)
        return (data + text[end:].encode()).decode(errors="replace")

    def number(self, lexeme: str, span: Span) -> int | float | str:
        digits = lexeme.lstrip("+-")
        if len(lexeme) > _MOST_DIGITS:
            return lexeme
        if digits[:2] in ("0x", "0X"):
            return int(lexeme, 16)
        if not digits.isdigit():
            return float(lexeme.rstrip("fF"))
        if len(digits) > 1 and digits[0] == "0":
            if set(digits) - set("01234567"):
                message = f"`{shown(lexeme)}` begins with 0 but is not octal"
                raise _SyntaxError(message, Label(span), hint="remove the leading 0")
            return int(lexeme, 8)
        return int(lexeme)

    def _count(self, span: Span) -> None:
        self.values += 1
        if self.values > _MOST_VALUES:
            raise _SyntaxError(f"holds more than {_MOST_VALUES} values", Label(span), is_format=True)

    def _no_field(self) -> _SyntaxError:
        span = self.here()
        if self.next_is("}>]"):
            return _SyntaxError(f"`{self.lexeme}` closes nothing", Label(span, "nothing is open here"))
        if self.next_is("["):
            return _SyntaxError("extensions `[…]` are not read", Label(span, "expected the name of a field"))
        if self.kind == "other":
            return self._strange(self.lexeme, span, self.start)
        place = Label(span, "expected `name: value` or `name { … }`")
        return _SyntaxError(f"`{shown(self.lexeme)}` stands where a field was expected", place)

    def _strange(self, lexeme: str, span: Span, start: int) -> _SyntaxError:
        if lexeme in "\"'":
            return _SyntaxError("a quote is never closed", Label(span, "opened here; a string ends on its line"))
        if lexeme == "/" and self.text[start : start + 2] == "//":
            return _SyntaxError("`//` begins no comment", Label(self.span(start, 2)), hint="a comment begins with `#`")
        number = re.compile(r"[-+]?[0-9.][A-Za-z0-9_.]*").match(self.text, start)
        if number:
            word = number.group()
            return _SyntaxError(f"`{shown(word)}` is neither a number nor a word", Label(self.span(start, len(word))))
        return _SyntaxError(f"`{shown(lexeme)}` means nothing here", Label(span))


def _character(match: re.Match[str]) -> str | None:
    code = match["short"] or match["long"]
    if not code:
        return _PLAIN.get(match["plain"])
    number = int(code, 16)
    return chr(number) if number <= _LARGEST_CHARACTER and not 0xD800 <= number < 0xE000 else None  # noqa: PLR2004 - surrogates
