"""Outline an exception: the user's line in its traceback, and where it and the exceptions before it came from.

This file imports nothing, because the first record of an exception must be written at once.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from types import TracebackType

_PACKAGES = ("/site-packages/", "/dist-packages/")
_NOT_OWN = (
    *_PACKAGES,
    "/lib/python3",
    "/ttlaunch/runtime/",
    "/ttlaunch/torch_hooks/",
    "<frozen ",
    "src/mpi4py/",
)
LONGEST_WORD = 1024
LONGEST_CHAIN = 8

MPI, TORCH, TTLAUNCH, CONNECTION = "mpi", "torch", "ttlaunch", "connection"
"""Where an exception was raised, as the field `origin` names it; empty for any other code."""
PAIR = "pair"
"""The other end of a connection that no rank can have; see `describe.broken_connections`."""
_ORIGINS = (
    ("mpi4py.", MPI),
    ("torch.distributed", TORCH),
    ("ttlaunch.runtime.comm", TTLAUNCH),
    ("multiprocessing.connection", CONNECTION),
    ("socket", CONNECTION),
    ("ssl", CONNECTION),
)
_TORCH_TYPES = {"DistBackendError", "DistError", "DistNetworkError", "DistStoreError"}
_TORCH_WORDS = ("gloo/transport/", "ProcessGroup", "Timed out waiting ", "ncclRemoteError")


def place_of(trace: TracebackType | None, folder: str | None = None) -> tuple[str | None, int | None]:
    """Return the innermost line of a file in a folder, or of the user's code, or of any code.

    Args:
        trace: The traceback of an exception.
        folder: The folder of the user's code, if it is known.
    """
    frames = [(file, line) for file, line, _ in _frames(trace)]
    inside = [one for one in frames if folder and one[0].startswith(folder + "/")]
    own = [one for one in frames if is_own_file(one[0])]
    if folder and is_own_file(folder + "/"):  # it may hold an environment with packages
        inside = [one for one in inside if is_own_file(one[0])]
    known = inside or own or frames
    return (known[-1][0][:LONGEST_WORD], known[-1][1]) if known else (None, None)


def raised_elsewhere(trace: TracebackType | None, place: tuple[str | None, int | None]) -> str | None:
    """Return where a package raised an exception that the user's line at `place` led to; None if that line, or Python, raised it."""
    frames = _frames(trace)
    if not frames or frames[-1][:2] == place:
        return None
    file, line, function = frames[-1]
    packages = [part for part in _PACKAGES if part in file]
    if not packages and not is_own_file(file):
        return None
    name = file.rpartition(packages[0])[2] if packages else file
    return f"raised at {name[:LONGEST_WORD]}:{line}, in {function[:LONGEST_WORD]}"


def _frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame of a traceback, outermost first."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def is_own_file(file: str) -> bool:
    """Whether a file of a stack is the user's own code, and not the interpreter's, a package's or ttlaunch's."""
    return not any(part in file for part in _NOT_OWN)


def causes_of(error: BaseException) -> list[tuple[str, str, str]]:
    """Return type, message and origin of an exception and of those that led to it."""
    return [(type(one).__name__, text_of(one), _origin(one)) for one in chain_of(error)]


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an exception, and those that it was raised from, or during whose handling it was raised."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and all(one is not known for known in chain) and len(chain) < LONGEST_CHAIN:
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return chain


def _origin(error: BaseException) -> str:
    """Return which code raised an exception: the innermost frames tell, or its type and words if it comes from compiled code."""
    module, name = str(type(error).__module__), type(error).__name__
    if module.startswith("mpi4py"):
        return MPI
    if name in _TORCH_TYPES or (
        isinstance(error, RuntimeError) and any(word in text_of(error) for word in _TORCH_WORDS)
    ):
        return TORCH
    trace, modules = error.__traceback__, []
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__", "")) + ".")
        trace = trace.tb_next
    for inner in reversed(modules[-3:]):
        for start, origin in _ORIGINS:
            if inner.startswith(start.rstrip(".") + "."):
                return origin
    return ""


def text_of(error: BaseException) -> str:
    """Return an exception's message."""
    try:
        return str(error)
    except Exception as wrong:  # noqa: BLE001 - an exception of the user's, whose `__str__` may do anything
        return f"its message cannot be made: {type(wrong).__name__}"
