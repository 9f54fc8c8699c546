"""Complete `--set KEY=VALUE` in the shell: the keys of the recipe on the command line, and the values of a key."""

import contextlib
import io
import os
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from ttlaunch.cli.console import print_lines
from ttlaunch.diagnostics import Diagnostic, shown

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from ttlaunch.spec.recipe.declare import Recipe

_LONGEST = 60
_TEXT = ""
_BASH = ("_TTLAUNCH_COMPLETE", "complete_bash")
_WORDS, _PLACE = "COMP_WORDS", "COMP_CWORD"


def complete_settings(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete the keys of a training file, and after `=` the values of a key that has only few.

    Returns:
        The completions, each with a description, which zsh and fish show.
    """
    from ttlaunch.spec.recipe.shared import settable_keys

    key, equals, _ = incomplete.partition("=")
    fields = settable_keys(_recipe(ctx))
    if not equals:
        matching = {name: field for name, field in fields.items() if name.startswith(key)}
        if len(matching) > 1:
            return [(f"{name}=", _about(field)) for name, field in matching.items()]
        key = next(iter(matching), key)
    field = fields.get(key)
    if field is None:
        return []
    found = [f"{key}={value}" for value in _values(field)]
    if not equals and len(found) < 2:  # noqa: PLR2004 - with a single completion, the shell would put a space after it
        found = [f"{key}=", *(found or [f"{key}={'null' if field.default is None else field.default}"])]
    return [(text, _about(field)) for text in found]


def completing_in_bash(work: Callable[[], int]) -> int:
    """Run the command line; if bash asks for completions, ask typer for those of whole words, and answer with parts.

    bash splits words at `=`, so `a.b=c` reaches typer as three words, and bash replaces only what follows the `=`.
    """
    if os.environ.get(_BASH[0]) != _BASH[1] or not os.environ.get(_PLACE, "").isdecimal():
        return work()
    kept = _join_split_words()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = work()
    print_lines(line.removeprefix(kept) for line in said.getvalue().splitlines())
    return status


def _join_split_words() -> str:
    """Join the words at `=` for typer, and return the part of the value at the cursor that bash does not replace."""
    words, place = os.environ.get(_WORDS, "").split("\n"), int(os.environ[_PLACE])
    joined, places = list[str](), list[int]()
    for number, word in enumerate(words):
        if joined and (word == "=" or words[number - 1] == "="):
            joined[-1] += word
        else:
            joined.append(word)
        places.append(len(joined) - 1)
    os.environ[_WORDS] = "\n".join(joined)
    os.environ[_PLACE] = str(places[place] if place < len(places) else len(joined))
    if place >= len(words) or "=" not in words[place - 1 : place + 1]:
        return ""
    whole = joined[places[place]]
    value = whole.partition("=")[2] if whole.startswith("-") else whole  # of `--set=a.b=c`, typer completes `a.b=c`
    return value[: value.rfind("=") + 1]


def _recipe(ctx: typer.Context) -> "Recipe | None":
    """Return the recipe that the command line names so far; None if it names none that can be read."""
    from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe

    # Since `--set` has no value yet, typer leaves the arguments of the command in `args`.
    given = [*(ctx.params.get(name) for name in ("target", "recipe", "recipes")), ctx.args]
    name = next((one if isinstance(one, str) else one[0] for one in given if one), None)
    if name is None:
        return None
    found = find_recipe(name.partition(":")[0], working_folder=Path.cwd())
    if isinstance(found, Diagnostic):
        return None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        recipe = load_recipe(found)
    return None if isinstance(recipe, Diagnostic) else recipe


def _about(field: "FieldInfo") -> str:
    """Return the description of a key, short enough that typer breaks no line, at which fish would begin another word."""
    return shown(field.description or "", longest=_LONGEST)


def _values(field: "FieldInfo") -> list[str]:
    """List the values of a key with few values, or else its default; nothing for a text, which may be a path."""
    found = list(dict.fromkeys(_choices(field.annotation)))
    if _TEXT in found:
        return []
    if found in ([], ["null"]) and isinstance(field.default, int | float):
        found.insert(0, str(field.default))
    return found


def _choices(annotation: Any) -> Iterator[str]:
    """Yield the words that a type allows; none for a type with many values."""
    origin = get_origin(annotation)
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif annotation is str:
        yield _TEXT
    elif origin is Literal:
        yield from map(str, get_args(annotation))
    elif origin is Annotated:
        yield from _choices(get_args(annotation)[0])
    elif origin in {Union, types.UnionType}:
        yield from _all(get_args(annotation))


def _all(annotations: Iterable[Any]) -> Iterator[str]:
    for annotation in annotations:
        yield from _choices(annotation)
