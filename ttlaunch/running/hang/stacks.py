"""Parse the stack dumps of a rank, and find the recipe's line in them.

The rank's faulthandler writes a dump; `agent/stack_dump.py` writes it in the same form for a rank that cannot answer.
"""

import re
from collections.abc import Sequence

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.rank_exceptions.outline import is_own_file

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<function>.*)\Z')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x")
_ENTRY = "/ttlaunch/runtime/entry.py"
_BETWEEN = ("/ttlaunch/spec/recipe/importing.py", "/importlib/__init__.py", "<frozen ")
"""Files of the calls between the entry point and a recipe that is being imported."""


@dataclass(frozen=True)
class Frame:
    """One frame of a stack: a call that had not returned."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def parse_main_stack(text: str) -> tuple[Frame, ...]:
    """Return the stack of the main thread in the last dump of a file, innermost frame first; empty if there is no dump.

    The main thread is the last one whose stack contains the runtime's entry point; if no stack does, the last of all.
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
    """Return the innermost frame in the recipe's folder, or None if the runtime has not called the recipe.

    The folder is that of the file whose code the runtime called first.
    """
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
    """Return the frame to report: the recipe's, or for a program that is no recipe, the innermost of the user's own code."""
    if any(frame.file.endswith(_ENTRY) for frame in stack):
        return recipe_frame(stack)
    return next(iter(own_frames(stack)), next((frame for frame in stack if not frame.file.startswith("<")), None))


def own_frames(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames of the user's own code, innermost first; code of the interpreter, packages and ttlaunch is left out."""
    return tuple(frame for frame in stack if is_own_file(frame.file))
