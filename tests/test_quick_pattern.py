"""Expressions that are compiled when they are first used: they answer as those of `re`, and a start of a run compiles few."""

import copy
import re
import subprocess
import sys

import pytest

from ttlaunch.quick_pattern import quick_pattern


@pytest.mark.parametrize("text", ["(a)(?P<name>b+)", b"(a)(?P<name>b+)"])
def test_the_quick_pattern_answers_as_the_compiled_one_does(text):
    quick, compiled = quick_pattern(text, re.IGNORECASE), re.compile(text, re.IGNORECASE)
    subject = "xxABbb-" if isinstance(text, str) else b"xxABbb-"
    assert compiled.search(subject).groups() == quick.search(subject).groups()
    assert compiled.sub(subject[:1], subject) == quick.sub(subject[:1], subject)
    assert [compiled.fullmatch(subject), compiled.groupindex] == [quick.fullmatch(subject), quick.groupindex]
    assert compiled.pattern == quick.pattern


def test_a_mistake_in_an_expression_shows_at_its_first_use():
    broken = quick_pattern("(")
    with pytest.raises(re.error):
        broken.search("")


def test_a_quick_pattern_can_be_copied_and_lacks_what_a_compiled_one_lacks():
    assert copy.deepcopy(quick_pattern("a+")).fullmatch("aaa")
    with pytest.raises(AttributeError):
        _ = quick_pattern("a").no_such_method


def test_importing_what_a_run_needs_compiles_no_expression_of_the_launcher(tmp_path):
    """It compiled more than a hundred, in twice the time that Python takes to start."""
    code = """
import re, sys
real, compiled = re._compile, []
def noting(text, flags):
    frame = sys._getframe(2)
    if frame.f_code.co_name == "<module>":
        compiled.append(frame.f_globals["__name__"])
    return real(text, flags)
re._compile = noting
from ttlaunch.cli.main import main
sys.argv = ["ttlaunch", "plan", "-n", "2", "--engine", "agents", "--", "true"]
try:
    main()
finally:
    print(sorted({name for name in compiled if name.startswith("ttlaunch") and ".agent." not in name}), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert "[]" == done.stderr.splitlines()[-1]
