"""The place of `ttlaunch replay --break FILE:LINE`: a line of code at which a debugger can open in a step."""

import inspect
import os
from pathlib import Path
from types import CodeType

from ttlaunch import contract
from ttlaunch.diagnostics import file_error, shown, usage_error
from ttlaunch.lab.replay import Prepared
from ttlaunch.running.runs.files import read_object_if_any

_MOST_DIGITS = 9


def parse_place(text: str, prepared: Prepared) -> tuple[str, int]:
    """Read `FILE:LINE` of a recipe's code, as a debugger needs it.

    Raises:
        LaunchError: It is no place in the code that the replay runs.
    """
    name, _, number = text.rpartition(":")
    if not name or not number.isdecimal() or len(number) > _MOST_DIGITS or int(number) < 1:
        raise usage_error(f"`--break {shown(text)}` is no FILE:LINE", "`--break trainer.py:78`")
    candidates = [prepared.program / name, prepared.origin.working_folder / name, Path(name)]
    path = next((one.resolve() for one in candidates if os.path.isfile(one)), None)  # noqa: PTH113 - never raises
    original = read_object_if_any(prepared.origin.folder / contract.PLAN_FILE).get("recipe")
    if path is not None and isinstance(
        original, dict
    ):  # a path into the present folder means the kept copy of the file
        present = Path(str(original.get("folder"))).resolve()
        if path.is_relative_to(present):
            path = prepared.program.resolve() / path.relative_to(present)
    if path is None or not path.is_file():
        files = ", ".join(sorted(one.name for one in prepared.program.glob("*.py")))
        raise usage_error(f"there is no file {shown(name)} to break in", f"the recipe has {files}")
    _check_line(path, int(number), name)
    return str(path), int(number)


def _check_line(path: Path, line: int, name: str) -> None:
    """Refuse a line before which no debugger can open in a step: only lines of functions run there.

    Raises:
        LaunchError: It is such a line.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise file_error(name, error, verb="read") from error
    count = len(text.splitlines())
    if line > count:
        raise usage_error(f"{shown(name)} has no line {line}", f"it has {count}")
    lines = _lines_of_functions(text, str(path))
    if line not in lines:
        later = [one for one in lines if one > line]
        hint = (f"`--break {shown(name)}:{min(later)}` is the next such line",) if later else ()
        raise usage_error(f"line {line} of {shown(name)} is no code of a function, so no step runs it", *hint)


def _lines_of_functions(text: str, file: str) -> set[int]:
    """Return the numbers of the lines on which code of functions stands, as a debugger counts them."""
    try:
        codes = [compile(text, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise usage_error(f"{shown(file)} is no Python: {shown(error)}", "name a file of the recipe's code") from error
    lines: set[int] = set()
    while codes:
        code = codes.pop()
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        if code.co_flags & inspect.CO_OPTIMIZED:  # a function; modules and classes run when they are imported
            of_code = {at for *_, at in code.co_lines() if at is not None}
            # The call itself runs the line of `def`, and opens no debugger there.
            lines |= of_code - {code.co_firstlineno} or of_code
    return lines
