"""Check the arguments of a call from Python, and convert each to a plain value for a use case."""

import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttlaunch.app.run_spec import LOCAL, RunSpec
from ttlaunch.diagnostics import Diagnostic, LaunchError, did_you_mean, shown, usage_mistake

Target = str | Path | Sequence[str]
"""A recipe's name, a recipe's folder or a script; or a sequence with the command line of any program."""

_LEAST_WHOLE = {"ranks": 1, "nproc_per_node": 1, "nnodes": 1, "trace_steps": 1, "max_restarts": 0}
_LEAST = {"grace": 0, "lease": 2, "hang_timeout": 1}
"""The smallest value of each option that is a number, the same as on the command line."""

_PATHS = ("on", "config", "hostfile", "rank_bindings", "runs_dir", "resume", "keep")
_TEXTS = ("audit", "mpi_args", "engine", "profile_steps", "share_with", "coordinator")
_LISTS = ("args", "sinks")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,199}")
_PLAIN = re.compile(r"[A-Za-z_./~-][A-Za-z0-9_./~-]*")
"""Texts that YAML reads unchanged, unless it takes them for a number, a truth value or null."""


_PASSED_ON = ("ranks", "mpi_args", "engine", "resume", "trace_steps", "profile_steps", "elastic", "audit")
"""Options that a specification has under the same name."""


def refuse_strangers(function: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse unknown keyword arguments, which Python does not check if a function declares them by a `TypedDict`.

    Raises:
        TypeError: The function has no argument of that name.
    """
    for name in given:
        if name not in known:
            hints = "".join(f"; {hint}" for hint in did_you_mean(name, known)).replace("`", "'")
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{hints}")


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as plain values, without those that are None.

    Raises:
        LaunchError: Some options have wrong values; the error has a diagnostic for each.
    """
    mistakes: list[Diagnostic] = []
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        try:
            found[name] = _checked(name, value)
        except (TypeError, ValueError, RecursionError) as error:
            text = "…" if name == "env" else shown(_repr(value))  # it may hold secrets
            mistakes.append(_wrong(f"`{name}={text}`: {error}"))
    if mistakes:
        raise LaunchError(mistakes)
    return found


def spec_of(target: Target | None, options: Mapping[str, Any]) -> RunSpec:
    """Make the specification of a run from a call's target and options.

    Args:
        target: The program of the ranks; None if only the cluster is checked.
        options: The result of `checked_options`.

    Raises:
        LaunchError: The target or `config` cannot be used.
    """
    texts = [] if target is None else _target_texts(target)
    is_command = not (target is None or isinstance(target, str | Path))
    if target is not None and not texts:
        raise LaunchError([_wrong("the command line of the program is empty")])
    if options.get("config") == "-":
        message = "`config='-'`: standard input belongs to the program that calls; a file was expected"
        raise LaunchError([_wrong(message)])
    passed_on: dict[str, Any] = {name: options.get(name) for name in _PASSED_ON}
    return RunSpec(
        target=texts[0] if texts else None,
        on=options.get("on", LOCAL),
        config_file=options.get("config"),
        overrides=options.get("set", ()),
        hostfile=_path(options.get("hostfile")),
        rank_bindings=_path(options.get("rank_bindings")),
        arguments=(*texts[1:], *options.get("args", ())),
        runs_dir=Path(options.get("runs_dir", "runs")),
        is_command=is_command,
        naive=bool(options.get("naive", False)),
        independent=bool(options.get("independent", False)),
        env=options.get("env", ()),
        nproc_per_node=_number_text(options.get("nproc_per_node")),
        nnodes=_number_text(options.get("nnodes")),
        standalone=bool(options.get("standalone", False)),
        warm=bool(options.get("warm", False)),
        **passed_on,
    )


def no_target(what: str) -> LaunchError:
    """Make the error for a call that needs a target and has none."""
    return LaunchError([_wrong(f"there is no target: {what} was expected")])


def _wrong(message: str) -> Diagnostic:
    return usage_mistake(message)


def _repr(value: object) -> str:
    """Return the `repr` of a value for a message, or the name of its class if `repr` fails."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is somebody else's class
        return f"a {type(value).__name__}"


def _checked(name: str, value: Any) -> Any:
    """Return one option as a plain value.

    Raises:
        TypeError, ValueError: The option cannot have this value; the message says what was expected.
    """
    if name in _LEAST_WHOLE or name in _LEAST:
        return _number(name, value)
    if name in _PATHS:
        return _text(str(value) if isinstance(value, Path) else value, what="a text or a path")
    if name in _TEXTS:
        return _text(value, what="a text")
    if name in _LISTS:
        return tuple(_text(str(one) if isinstance(one, Path) else one, what="a text") for one in _list(value))
    if name == "set":
        if isinstance(value, Mapping):
            return tuple(f"{_key(key)}={_yaml(one)}" for key, one in value.items())
        return tuple(_text(one, what="`KEY=VALUE`") for one in _list(value))
    if name == "env":
        if isinstance(value, Mapping):
            return tuple(f"{_name(key)}={_text(one, what='a text as value')}" for key, one in value.items())
        return tuple(_text(one, what="`NAME=VALUE`") for one in _list(value))
    return value


def _number(name: str, value: Any) -> float:
    least = _LEAST_WHOLE.get(name, _LEAST.get(name, 0))
    what = f"{'a whole number' if name in _LEAST_WHOLE else 'a number'} of at least {least} was expected"
    if isinstance(value, bool | str | bytes):
        raise TypeError(what)
    try:
        number = operator.index(value) if name in _LEAST_WHOLE else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(what) from error
    if math.isnan(number) or number < least:
        raise ValueError(what)
    return number


def _text(value: object, *, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} was expected")
    if "\0" in value:
        raise ValueError("a text without NUL was expected")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text that UTF-8 can write was expected") from error
    return value


def _list(value: object) -> Sequence[object]:
    if isinstance(value, str | bytes | Mapping | set | frozenset) or not hasattr(value, "__iter__"):
        raise TypeError("a list of texts was expected")
    return list(value)


def _target_texts(target: Any) -> list[str]:
    """Return a target as a list of texts: one text for a recipe or a script.

    Raises:
        LaunchError: The target is neither a text, nor a path, nor a list of texts.
    """
    try:
        if isinstance(target, str | Path):
            return [_text(str(target), what="a text")]
        return [_text(str(one) if isinstance(one, Path) else one, what="a list of texts") for one in _list(target)]
    except (TypeError, ValueError) as error:
        message = f"{shown(_repr(target))} is no target: {error}"
        raise LaunchError([_wrong(message)]) from error


def _key(key: object) -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"{shown(_repr(key))} is no key; one such as 'training_config.steps' was expected")
    return key


def _name(name: object) -> str:
    if "=" in (text := _text(name, what="a name")):
        raise ValueError("a name without `=` was expected")
    return text


def _yaml(value: object) -> str:
    """Write a value as YAML for `--set`; a text is quoted unless YAML certainly reads it unchanged."""
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        return json.dumps(value, default=_plain)
    import yaml

    _text(value, what="a text")
    try:
        float(value)
    except ValueError:
        if _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
            return value
    return json.dumps(value)


def _plain(value: object) -> object:
    """Convert a numpy scalar to a Python number, and a path to a text.

    Raises:
        TypeError: A training file cannot contain such a value.
    """
    if isinstance(value, Path):
        return str(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        found: object = item()
        return found
    raise TypeError(f"a {type(value).__name__} has no place in a training file")


def _number_text(given: int | None) -> str | None:
    return None if given is None else str(given)


def _path(given: str | None) -> Path | None:
    return None if given is None else Path(given)
