"""Tell whether the exception that a thread is handling will end it, from the code around the lines where the thread is.

A rank that cleans up in a `finally` clause has failed already, while one that waits in an `except` clause will try again. Only
the source tells the two apart before the clause has ended. What cannot be told counts as something that goes on.
Python 3.9 and the standard library only.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any

_MOST_FRAMES = 200
_LARGEST_SOURCE = 1_000_000
_trees: dict[str, ast.Module | None] = {}
"""The parsed files of the frames that were looked at."""

_LEAVES = (ast.Return, ast.Break, ast.Continue)
_WITHS = (ast.With, ast.AsyncWith)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def will_end(error: BaseException, frame: FrameType, *, last: str = "") -> bool:  # noqa: C901 - one look at each frame
    """Whether nothing on the stack of a thread will keep an exception from ending it.

    Args:
        error: The exception that the thread is handling, as `sys._current_exceptions` has it.
        frame: The innermost frame of the thread.
        last: The end of the name of a file whose frames end the process after any exception; frames around them do not count.
    """
    trace = error.__traceback__
    stack = _stack(frame)
    if trace is None or trace.tb_frame not in stack:
        return False
    kind: type | None = type(error)
    for place in stack[stack.index(trace.tb_frame) :]:
        name = place.f_code.co_filename
        if last and name.endswith(last):
            return True
        is_handling = place is trace.tb_frame
        if not is_handling and (name.endswith("/contextlib.py") or name.startswith("<frozen ")):
            continue  # it raises again what the generator of a `with` statement raises; runpy catches nothing
        tree = _parsed(name)
        if tree is None:
            return False
        around = _way_of(tree, place.f_lineno)
        if is_handling:
            found = _handling(around, trace.tb_lineno, place.f_lineno)
            if found is None:
                return False
            index, clause = found
            around, kind = around[:index], _kind_after(clause, kind)
        for node in reversed(around):
            if not _lets_pass(node, place, kind):
                return False
            for handler in _catching(node, place, kind):
                kind = _kind_after(handler, kind)
    return True


def _stack(frame: FrameType) -> list[FrameType]:
    """Return the frames of a thread, innermost first, as many as are worth a look."""
    stack: list[FrameType] = []
    one: FrameType | None = frame
    while one is not None and len(stack) < _MOST_FRAMES:
        stack.append(one)
        one = one.f_back
    return stack


def _parsed(name: str) -> ast.Module | None:
    if name not in _trees:
        _trees[name] = None
        lines = linecache.getlines(name)
        if lines and sum(map(len, lines)) <= _LARGEST_SOURCE:
            with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                _trees[name] = ast.parse("".join(lines))
    return _trees[name]


def _way_of(tree: ast.Module, line: int) -> list[Any]:
    """Return the `try` and `with` statements around a line, outermost first, within the innermost function around it."""
    way: list[Any] = []
    node: ast.AST | None = tree
    while node is not None:
        node = next((child for child in ast.iter_child_nodes(node) if _spans(child, line)), None)
        if isinstance(node, _FUNCTIONS):
            way.clear()
        elif isinstance(node, _WITHS) or type(node).__name__ in ("Try", "TryStar"):
            way.append(node)
    return way


def _spans(node: ast.AST, line: int) -> bool:
    if not hasattr(node, "lineno"):  # such as a case of `match`
        return any(_spans(child, line) for child in ast.iter_child_nodes(node))
    return node.lineno <= line <= (node.end_lineno or node.lineno)  # type: ignore[attr-defined, no-any-return]


def _is_in(nodes: Sequence[ast.AST], line: int) -> bool:
    return any(_spans(node, line) for node in nodes)


def _handling(way: Sequence[Any], raised: int, now: int) -> tuple[int, ast.ExceptHandler | None] | None:
    """Find the statement whose clause is handling the exception; None if there is none, or if the clause may not raise it again.

    Args:
        way: The statements around the line where the thread is.
        raised: The line of the same function at which the exception came by.
        now: The line where the thread is.

    Returns:
        The index of the statement, and its `except` clause if it is one.
    """
    for index in reversed(range(len(way))):
        node = way[index]
        if isinstance(node, _WITHS):
            if _is_in(node.body, raised) and not _is_in(node.body, now):
                return None if _may_suppress(node) else (index, None)
        elif _is_in(node.finalbody, now) and not _is_in(node.finalbody, raised):
            return None if _has(node.finalbody, _LEAVES) else (index, None)
        else:
            for handler in node.handlers:
                if _is_in(handler.body, now) and not _is_in(handler.body, raised):
                    return (index, handler) if _raises(handler) and not _has(node.finalbody, _LEAVES) else None
    return None


def _lets_pass(node: Any, frame: FrameType, kind: type | None) -> bool:
    """Whether a statement around a line does not keep an exception of a type that leaves this line; None is any type."""
    if isinstance(node, _WITHS):
        return not _may_suppress(node)
    if type(node).__name__ == "TryStar" or _has(node.finalbody, _LEAVES):
        return False
    return all(_raises(handler) for handler in _catching(node, frame, kind))


def _catching(node: Any, frame: FrameType, kind: type | None) -> list[ast.ExceptHandler]:
    """Return the `except` clauses that may catch an exception of a type from the line where a function is."""
    if isinstance(node, _WITHS) or not _is_in(node.body, frame.f_lineno):
        return []
    return [handler for handler in node.handlers if _may_catch(handler.type, frame, kind)]


def _kind_after(handler: ast.ExceptHandler | None, kind: type | None) -> type | None:
    """Return the type of the exception that a clause raises at its end; None if it raises another one."""
    last = None if handler is None else handler.body[-1]
    raised = last.exc if isinstance(last, ast.Raise) else None
    if handler is None or raised is None or (isinstance(raised, ast.Name) and raised.id == handler.name):
        return kind
    return None


def _may_suppress(node: ast.With | ast.AsyncWith) -> bool:
    """Whether a `with` statement may keep an exception; besides `contextlib.suppress`, hardly any does."""
    return any(word in ast.dump(item.context_expr) for item in node.items for word in ("suppress", "raises"))


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether an `except` clause always ends by raising."""
    return isinstance(handler.body[-1], ast.Raise) and not _has(handler.body, _LEAVES)


def _has(body: Sequence[ast.AST], kinds: tuple[type, ...]) -> bool:
    """Whether a statement of some kind is in a body, without the functions that are defined there."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, kinds):
            return True
        if not isinstance(node, _FUNCTIONS):
            waiting += ast.iter_child_nodes(node)
    return False


def _may_catch(types: ast.expr | None, frame: FrameType, kind: type | None) -> bool:
    """Whether an `except` clause catches exceptions of a type; what cannot be looked up catches it."""
    if types is None or kind is None:
        return True
    if isinstance(types, ast.Tuple):
        return any(_may_catch(one, frame, kind) for one in types.elts)
    found = _look_up(types, frame)
    return not isinstance(found, type) or found in kind.__mro__


def _look_up(expression: ast.expr, frame: FrameType) -> object:
    """Return what a name such as `OSError` or `queue.Empty` stands for, without running any code; None if that is not known."""
    if isinstance(expression, ast.Name):
        return frame.f_globals.get(expression.id, getattr(builtins, expression.id, None))
    if isinstance(expression, ast.Attribute):
        holder = _look_up(expression.value, frame)
        return vars(holder).get(expression.attr) if type(holder) is type(ast) else None
    return None
