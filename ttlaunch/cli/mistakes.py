"""Describe a mistake in what was typed, such as an unknown option or a wrong number, as a diagnostic.

typer reports such mistakes in its own words and those of pydantic, and never as JSON.
"""

import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, closest, did_you_mean, listed, shown, usage_mistake
from ttlaunch.quick_pattern import quick_pattern

_ALIKE = 0.8
_SHORT = {"lr": "learning_rate", "bs": "batch_size"}
"""What is usually meant by an option that is too short to be compared with the names of keys."""
_NO_COMMAND = quick_pattern(r"No such command '(.*?)'\.")
_SETTING = quick_pattern(r"\w+(\.\w+)+=")
_OUT_OF_CHOICES = quick_pattern(r"is not one of (.+?)\.?\Z")


def is_mistake(error: Exception) -> bool:
    """Whether an exception is typer's report of a mistake; typer has a private copy of the classes of click.

    The exception that shows the help, because nothing was typed, is not meant.
    """
    return getattr(error, "exit_code", None) == 2 and "ctx" in vars(error) and "NoArgs" not in type(error).__name__  # noqa: PLR2004


def format_of(words: Sequence[str]) -> Format:
    """Return the format that a command line asks for, as far as it can be read without its mistake."""
    words = _own(words)
    asked = [word.partition("=")[2] for word in words if word.startswith("--format=")]
    asked += [value for option, value in pairwise(words) if option == "--format"]
    return next((form for form in Format if form in asked), Format.FULL)


def describe(error: Any, words: Sequence[str]) -> LaunchError:
    """Make the error with the diagnostic for a mistake that typer reports.

    Args:
        error: The exception of typer.
        words: The words of the command line.
    """
    command = error.ctx.command_path if error.ctx is not None else " ".join(["ttlaunch", *words[:1]])
    if hasattr(error, "possibilities"):
        found = _unknown_option(error, words, command=command)
    elif getattr(error, "param", None) is not None and type(error).__name__ == "BadParameter":
        found = _wrong_value(error)
    else:
        found = _other(error, command=command)
    return LaunchError([found], status=2)


def _own(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def _as_sentence(text: str) -> str:
    """Write a message of click as one of ours: with backticks, not capitalised, without a full stop."""
    text = text.removesuffix(".").replace("'", "`")
    return text[:1].lower() + text[1:]


def _other(error: Any, *, command: str) -> Diagnostic:
    """Describe an unknown command, or something that is missing."""
    message, shows = error.format_message(), f"`{command} --help` shows how to call it"
    typed = _NO_COMMAND.match(message)
    if typed is None:
        return usage_mistake(_as_sentence(message), shows)
    hints = did_you_mean(typed[1], getattr(error.ctx.command, "commands", ()))
    return usage_mistake(
        f"`{command}` has no command `{shown(typed[1])}`", *(hints or (f"`{command} --help` lists all",))
    )


def _wrong_value(error: Any) -> Diagnostic:
    """Describe a value that an option cannot have, in the words of diagnostics about files."""
    from pydantic import ValidationError

    from ttlaunch.spec.located.wrong_value import Complaint

    is_option = error.param.param_type_name == "option"
    name = max(error.param.opts, key=len) if is_option else error.param.metavar or str(error.param.name).upper()
    if not isinstance(error.__cause__, ValidationError):
        return usage_mistake(f"`{name}`: {_as_sentence(error.message)}")
    detail = error.__cause__.errors(include_url=False)[0]
    expected = Complaint(detail["type"], (), detail["msg"], detail.get("ctx", {})).expected
    choices = _OUT_OF_CHOICES.search(expected)
    known = [word.strip("'") for word in choices[1].split(", ")] if choices else []
    value = str(detail["input"])
    hints = did_you_mean(value, known)
    return usage_mistake(f"`{name}` is `{shown(value)}`; {listed(known) if known else expected} was expected", *hints)


def _unknown_option(error: Any, words: Sequence[str], *, command: str) -> Diagnostic:
    """Describe an unknown option; it may be a key of the training file, or the option of a script."""
    own = _own(words)
    letters = (word.partition("=")[0] for word in own if word[:2] == error.option_name)
    option = next(letters, str(error.option_name))  # of `-steps`, typer reports only `-s`
    message = f"`{command}` has no option `{shown(option)}`"
    parameters = {parameter.name: parameter for parameter in error.ctx.command.params}
    known = [name for one in parameters.values() if not getattr(one, "hidden", False) for name in one.opts]
    # The dashes that all options share would make any short one like any other.
    best = closest(option.lstrip("-"), [name[2:] for name in known if name.startswith("--")])
    near: tuple[str, ...] = (f"did you mean `--{best}`?",) if best else ()
    if "overrides" in parameters:
        from ttlaunch.spec.recipe.declare import Recipe
        from ttlaunch.spec.recipe.shared import settable_keys

        target = _target(own)
        has_script = "arguments" in parameters and isinstance(target, str)
        if "nproc_per_node" in parameters and not (has_script and _place(own, option) > own.index(target)):
            from ttlaunch.app.torchrun_options import instead_of

            instead = instead_of(option)
            if instead:
                return usage_mistake(message, instead)
        if has_script:
            return usage_mistake(message, _for_the_script(own, option, target, command=command))
        near = _settings(settable_keys(target if isinstance(target, Recipe) else None), option, own) or near
    return usage_mistake(message, *(near or (f"`{command} --help` lists all",)))


def _settings(keys: Iterable[str], option: str, words: Sequence[str]) -> tuple[str, ...]:
    """Suggest `--set` for each key of a training file whose last part was used as an option; none for other words.

    An option with another name whose value is `SECTION.KEY=VALUE`, such as `--override`, means `--set` too.
    """
    from difflib import get_close_matches

    value = _value_of(words, option)
    if _SETTING.match(value):
        return (f"did you mean `--set {shlex.quote(value)}`?",)
    word = option.lstrip("-").replace("-", "_")
    by_name: dict[str, list[str]] = {}
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    meant = get_close_matches(_SHORT.get(word, word), by_name, n=1, cutoff=_ALIKE)
    assigned = [f"{key}={value}" for name in meant or _ending_with(word, by_name) for key in by_name[name]]
    return tuple(f"did you mean `--set {shlex.quote(text)}`?" for text in assigned)


def _ending_with(word: str, names: Iterable[str]) -> list[str]:
    """Return the name that ends with a word, such as `num_workers` for `workers`; none if there are several."""
    found = [name for name in names if name.endswith(f"_{word}")]
    return found if len(found) == 1 else []


def _target(words: Sequence[str]) -> Any:
    """Return the recipe that the words name, or the name of a script, or None."""
    from ttlaunch.app.resolve import is_script
    from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe

    here = Path.cwd()
    for word in words[1:]:
        if word.startswith("-"):
            continue
        if is_script(word, here):
            return word
        found = find_recipe(word, working_folder=here)
        if not isinstance(found, Diagnostic):
            with redirect_stdout(sys.stderr):  # what a recipe.py prints must not mix with JSON
                return load_recipe(found)
    return None


def _place(words: Sequence[str], option: str) -> int:
    """Return the index of the first word that is an option, with or without a value behind `=`; the end if none is."""
    return next((n for n, word in enumerate(words) if word.partition("=")[0] == option), len(words))


def _value_of(words: Sequence[str], option: str) -> str:
    """Return the value that was typed for an option, or `VALUE` if none was."""
    place = _place(words, option)
    if "=" in "".join(words[place : place + 1]):
        return words[place].partition("=")[2]
    return next((word for word in words[place + 1 : place + 2] if not word.startswith("--")), "VALUE")


def _for_the_script(words: Sequence[str], option: str, script: str, *, command: str) -> str:
    """Suggest to write the options of a script behind `--`."""
    place = _place(words, option)
    rest = [word for word in words[place:] if word != script]
    return f"write the arguments of the script after `--`: `{command} {shlex.quote(script)} -- {shlex.join(rest)}`"
