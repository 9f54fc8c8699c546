"""One word for one thing: names in the code, the docs and the help use the field's words, and none of those they replaced."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAY_INSTEAD = {
    "attendant": "agent",
    "attendants": "agents",
    "attendance": "agent",
    "attended": "agent",
    "crew": "rank controller",
    "books": "telemetry",
    "wishes": "requirements",
    "spool": "send buffer",
    "spy": "stack dump",
    "spied": "stack dump",
    "tether": "parent-death signal",
    "ledger": "traffic counter",
    "desk": "parameter server",
    "hub": "gradient aggregator",
    "uplink": "gradient sender",
    "downlink": "weight receiver",
}
"""What a part of a name must not be, and the word that stands for the thing."""

PHRASES = {r"black[- ]box(es)?": "flight recorder", r"last words": "stderr tail, or the last lines of a log"}
"""What prose must not have, as regular expressions; compared without regard to case."""

IN_NAMES_ONLY = {"books", "spy"}
"""Words that prose may have: a file may be called books, and py-spy is a program."""

ALIASES = {"RankContext.ledger"}
"""Former names that trainers of users may still use; they lead to the new ones."""

ALIASED_PARAMETERS = {"ledger: TrafficCounter"}
"""Former names of parameters, as a signature has them."""

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def parts(name: str) -> set[str]:
    """The words in a name, in snake case or camel case."""
    return {part.lower() for part in _PARTS.findall(re.sub("py_spy", "", name, flags=re.IGNORECASE))}


def may_have_replaced(text: str) -> bool:
    """Whether a text needs a closer look: most have no replaced word, which takes a hundredth of the time to find."""
    lower = text.lower()
    return any(word in lower for word in SAY_INSTEAD)


def names(path: Path) -> set[str]:
    """What a module defines or takes: its own name, classes, functions, parameters, assigned names and attributes.

    Of a module whose text has no replaced word at all, only its own name.
    """
    found, text = {path.stem}, path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if may_have_replaced(text) else ():
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return found - {alias.split(".")[1] for alias in ALIASES}


def replaced(found: set[str]) -> dict[str, str]:
    """The names with a word that has been replaced, and what to say instead."""
    return {name: SAY_INSTEAD[part] for name in sorted(found) for part in parts(name) & SAY_INSTEAD.keys()}


@pytest.mark.parametrize("folder", ["ttlaunch", "recipes", "benchmarks"])
def test_names_in_the_code_use_the_words_of_the_field(folder):
    found = {path: replaced(names(path)) for path in sorted((ROOT / folder).rglob("*.py"))}
    assert {} == {str(path.relative_to(ROOT)): words for path, words in found.items() if words}


PROSE = [
    ROOT / "README.md",
    *(path for folder in ("docs", "recipes", "ttlaunch") for path in (ROOT / folder).rglob("*.md")),
]


def replaced_in_prose(text: str) -> dict[str, str]:
    """The replaced words and phrases of a page, and what to say instead; names of files and keys are checked where they are made."""
    plain = re.sub("|".join([r"`[^`\n]*`", *map(re.escape, ALIASES | ALIASED_PARAMETERS)]), "", text)
    words = {rf"\b{word}\b": better for word, better in SAY_INSTEAD.items() if word not in IN_NAMES_ONLY} | PHRASES
    return {word: better for word, better in words.items() if re.search(word, plain, re.IGNORECASE)}


def test_pages_use_the_words_of_the_field():
    found = {path: replaced_in_prose(path.read_text(encoding="utf-8")) for path in PROSE}
    assert {} == {str(path.relative_to(ROOT)): words for path, words in found.items() if words}


def test_a_replaced_word_is_found_in_both_ways_of_writing_a_name():
    assert {"HostsCrew": "rank controller", "end_attendants": "agents"} == replaced(
        {"HostsCrew", "end_attendants", "host"}
    )
