"""Parse the stacks of a rank, and find the recipe's line in them.

The text was written by faulthandler, or in the same form by `agent/stack_dump.py` for a rank that could not answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<function>.*)\Z')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x")
_ENTRY = "/ttlaunch/runtime/entry.py"
_BETWEEN = ("/ttlaunch/spec/recipe/importing.py", "/importlib/__init__.py", "<frozen ")
"""Files of the calls between the entry point and a recipe that is being imported."""


@dataclass(frozen=True)
class Frame:
    """A call that had not returned."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def parse_main_stack(text: str) -> tuple[Frame, ...]:
    """The main thread of a rank in the last of the dumps that a file holds, innermost frame first; empty: there is none.

    It is the one that the runtime began in; in a process that has not come so far, or is no rank of a recipe, the last one.
    """
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            threads[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
    mains = [frames for frames in threads if any(frame.file.endswith(_ENTRY) for frame in frames)]
    return tuple((mains or threads or [[]])[-1])


def recipe_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost call in the recipe's folder: that of the file whose function the runtime called; None before that."""
    called = None
    for frame in stack:
        if frame.file.endswith(_ENTRY):
            break
        called = called if frame.file.endswith(_BETWEEN) or frame.file.startswith(_BETWEEN) else frame
    else:
        return None
    if called is None:
        return None
    folder = called.file.rpartition("/")[0] + "/"
    return next((frame for frame in stack if frame.file.startswith(folder)), None)


def frame_to_report(stack: Sequence[Frame]) -> Frame | None:
    """The call to report: the recipe's; of a process without a recipe, the innermost call in a file."""
    if any(frame.file.endswith(_ENTRY) for frame in stack):
        return recipe_frame(stack)
    return next((frame for frame in stack if not frame.file.startswith("<")), None)
