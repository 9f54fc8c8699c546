"""How words of the command line become values: what typer would convert slowly, and what follows `--`."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

from typer.core import TyperCommand

from ttlaunch.quick_pattern import quick_pattern

_COUNT = "ttlaunch.words_after_dashes"
_NUMBER = quick_pattern(r"0|[1-9][0-9]{0,8}")


class QuickCommand(TyperCommand):
    """A command for which typer converts only those values that have to be converted."""

    def get_params(self, ctx: Any) -> Any:
        """Return the command's options and arguments, and `--help`."""
        return convert_little(self, super().get_params(ctx))


def convert_little(command: Any, parameters: Any) -> Any:
    """Let typer convert only those values that have to be converted, and return the command's parameters.

    typer converts values with pydantic, even a default or a text. Most command lines have nothing else but numbers, and
    importing pydantic takes a fifth of the time of a short command.
    """
    kinds = {name: _kind(one.annotation) for name, one in inspect.signature(command.callback).parameters.items()}
    for parameter in parameters:
        if not isinstance(parameter.process_value, partial):  # typer asks for the parameters several times
            kind = kinds.get(parameter.name, bool)  # typer's own options are flags
            parameter.process_value = partial(
                _convert, parameter=parameter, kind=kind, by_typer=parameter.process_value
            )
    return parameters


def _kind(annotation: Any) -> Any:
    """Return the type of an option's value, also if the option may be left out."""
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    given = [one for one in get_args(inner) if one is not type(None)]
    return given[0] if isinstance(inner, UnionType) and len(given) == 1 else inner


def _convert(ctx: Any, value: Any, *, parameter: Any, kind: Any, by_typer: Callable[[Any, Any], Any]) -> Any:
    """Return the value that the command gets."""
    several = parameter.multiple or parameter.nargs != 1
    is_default = ctx.get_parameter_source(parameter.name).name == "DEFAULT"
    if not value and (several or value is None):
        if parameter.required:
            return by_typer(ctx, value)
        value = () if several else None
    elif kind == list[str]:
        value = list(value)
    elif kind is int and isinstance(value, str) and _is_number_within(value, parameter.type_descriptor.parameter_info):
        value = int(value)
    elif several or not (type(value) is kind is str or (is_default and kind in type(value).__mro__)):
        return by_typer(ctx, value)
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _is_number_within(text: str, bounds: Any) -> bool:
    """Whether a text is certainly an integer that an option takes; typer reads and refuses all others."""
    if not _NUMBER.fullmatch(text):
        return False
    return (bounds.min is None or bounds.min <= int(text)) and (bounds.max is None or int(text) <= bounds.max)


class CommandAfterDashes(QuickCommand):
    """A command that records how many arguments followed `--`, which typer's parser does not keep."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Record the number of arguments after `--`, then parse as usual."""
        args = _with_dashes(args, self.params)
        ctx.meta[_COUNT] = len(args) - args.index("--") - 1 if "--" in args else 0
        return super().parse_args(ctx, args)


def _with_dashes(words: list[str], options: Sequence[Any]) -> list[str]:
    """Put `--` behind a script if only its own words follow it, as in `run train.py --lr 0.1` or `run train.py a -- b`.

    With options of both, `--ranks 2` among them could be meant for either, so the parser refuses the foreign ones and says where `--` goes.
    """
    from ttlaunch.app.resolve import is_script

    takes_value = {name: not option.is_flag for option in options if option.opts[0][:1] == "-" for name in option.opts}
    script, foreign, skipped = None, False, False
    for place, word in enumerate(words):
        name = word.partition("=")[0]
        if skipped:
            skipped = False
        elif word == "--":
            if script is None or script == place - 1 or foreign:
                return words
            foreign = True  # behind a script's own words, it is one of them
            break
        elif word[:1] != "-" or word == "-":
            if script is None and not is_script(word, Path.cwd()):
                return words
            script = place if script is None else script
        elif name in takes_value or (word[:2] != "--" and word[:2] in takes_value):
            if script is not None:
                return words
            skipped = name == word and takes_value.get(word, False)
        elif script is None:
            return words
        else:
            foreign = True
    return [*words[: script + 1], "--", *words[script + 1 :]] if script is not None and foreign else words


def is_command(ctx: Any, target: str, arguments: Sequence[str]) -> bool:
    """Whether the target itself followed `--`, so that it is a program's command line."""
    return bool(ctx.meta.get(_COUNT, 0) >= len([target, *arguments]))
