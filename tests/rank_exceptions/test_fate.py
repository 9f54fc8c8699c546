"""Whether an exception that is being handled will end its thread, from the clauses around it."""

import contextlib
import sys
import textwrap

import pytest

from ttlaunch.rank_exceptions.fate import will_end

ENDS = {
    "finally": """
        try:
            raise ValueError
        finally:
            look()
        """,
    "finally in a function, and a clause for other exceptions around its call": """
        def work():
            try:
                raise ValueError
            finally:
                look()
        try:
            work()
        except (KeyError, OSError):
            pass
        """,
    "a clause that raises again": """
        try:
            raise ValueError
        except Exception:
            look()
            raise
        """,
    "a clause that raises another one": """
        try:
            raise ValueError
        except ValueError as error:
            look()
            raise RuntimeError from error
        """,
    "the end of a with statement": """
        class Closes:
            def __enter__(self):
                pass
            def __exit__(self, *_):
                look()
        with Closes():
            raise ValueError
        """,
    "a generator of contextlib": """
        from contextlib import contextmanager
        @contextmanager
        def closes():
            try:
                yield
            finally:
                look()
        with closes():
            raise ValueError
        """,
    "finally inside a case of match": """
        match 3:
            case 3:
                try:
                    raise ValueError
                finally:
                    look()
        """,
    "an outer clause that raises the same again": """
        try:
            try:
                raise ValueError
            finally:
                look()
        except BaseException as error:
            raise error
        """,
}
GOES_ON = {
    "a clause that keeps it": """
        try:
            raise ValueError
        except ValueError:
            look()
        """,
    "a loop that tries again": """
        for _ in range(2):
            try:
                raise ValueError
            except ValueError:
                look()
                continue
        """,
    "a clause that raises only at the last time": """
        for time in range(2):
            try:
                raise ValueError
            except ValueError:
                look()
                if time == 1:
                    raise
        """,
    "finally, and a clause that keeps it around the call": """
        def work():
            try:
                raise ValueError
            finally:
                look()
        try:
            work()
        except ValueError:
            pass
        """,
    "finally, and a clause whose types are not known": """
        def types():
            return ValueError
        def work():
            try:
                raise ValueError
            finally:
                look()
        try:
            work()
        except types():
            pass
        """,
    "finally that returns": """
        def work():
            try:
                raise ValueError
            finally:
                look()
                return 3
        work()
        """,
    "suppress": """
        from contextlib import suppress
        with suppress(ValueError):
            try:
                raise ValueError
            finally:
                look()
        """,
    "another exception, for which a clause around waits": """
        try:
            try:
                raise ValueError
            except ValueError:
                look()
                raise KeyError
        except KeyError:
            pass
        """,
    "except* of a group": """
        try:
            try:
                raise ExceptionGroup("", [ValueError()])
            finally:
                look()
        except* ValueError:
            pass
        """,
}


def looked(here, code):
    """What is said of the exception that is handled where the code calls `look`."""
    answers = []

    def look():
        answers.append(will_end(sys.exc_info()[1], sys._getframe(1), last="/test_fate.py"))

    path = here / "code.py"
    path.write_text(textwrap.dedent(code))
    with contextlib.suppress(ValueError, RuntimeError):
        exec(compile(path.read_text(), str(path), "exec"), {"look": look})  # noqa: S102
    return answers[0]


@pytest.mark.parametrize("case", ENDS)
def test_an_exception_that_nothing_keeps_will_end_its_thread(here, case):
    assert looked(here, ENDS[case])


@pytest.mark.parametrize("case", GOES_ON)
def test_an_exception_that_a_clause_may_keep_is_not_said_to_end_its_thread(here, case):
    assert not looked(here, GOES_ON[case])


@pytest.mark.parametrize("file", ["<no file>", "<frozen importlib._bootstrap>"])
def test_code_without_a_source_may_keep_any_exception(file):
    answers = []
    code = "try:\n    raise ValueError\nfinally:\n    answers.append(look())"
    look = lambda: will_end(sys.exc_info()[1], sys._getframe(1), last="/test_fate.py")  # noqa: E731
    with contextlib.suppress(ValueError):
        exec(compile(code, file, "exec"), {"look": look, "answers": answers})  # noqa: S102
    assert answers == [False]
