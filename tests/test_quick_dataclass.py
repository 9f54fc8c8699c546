"""The quick `dataclass` makes instances that differ in nothing from those of the standard one."""

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import ClassVar

import pytest

from ttlaunch.quick_dataclass import dataclass

KINDS = {"quick": dataclass, "standard": dataclasses.dataclass}


def classes(dataclass):
    """The same classes, made with one of the decorators."""

    @dataclass(frozen=True)
    class Point:
        """A point."""

        kind: ClassVar[str] = "point"
        x: float
        y: float = 0.0
        tags: list = field(default_factory=list, repr=False, compare=False)

    @dataclass(frozen=True)
    class Named(Point):
        """A point with a name, which is keyword-only, and one that it computes."""

        name: str = field(default="", kw_only=True)
        shown: str = field(init=False, default="")

        def __post_init__(self):
            object.__setattr__(self, "shown", self.name.upper())

    @dataclass
    class Count:
        """A counter with an equality of its own."""

        value: int = 0

        def __eq__(self, other):
            return other == self.value

        __hash__ = None

    @dataclass(kw_only=True)
    class Options:
        """Keywords only."""

        a: int
        b: int = 2

    return Point, Named, Count, Options


def answers(dataclass):
    """What the classes answer to everything that code does with them, as texts."""
    point, named, count, options = classes(dataclass)
    nan = float("nan")
    asked = [
        lambda: point(1.0),
        lambda: point(x=1.0, y=2.0, tags=[1]).tags,
        lambda: point(1.0).tags is point(1.0).tags,
        lambda: named(1.0, 2.0, [3], name="a").shown,
        lambda: named(1.0, 2.0, [3], "a"),
        point,
        lambda: point(1.0, z=1),
        lambda: options(1),
        lambda: options(a=1),
        lambda: point(1.0) == point(1.0, tags=[1]),
        lambda: point(nan) == point(nan),
        lambda: point(1.0) == named(1.0),
        lambda: point(1.0) == 1.0,
        lambda: hash(point(1.0)) == hash(point(1.0, tags=[1])),
        lambda: hash(options(a=1)),
        lambda: hash(count()),
        lambda: count(3) == 3,
        lambda: dataclasses.replace(named(1.0, name="a"), name="b").shown,
        lambda: dataclasses.replace(named(1.0), shown="b"),
        lambda: dataclasses.asdict(named(1.0, name="a")),
        lambda: [one.name for one in dataclasses.fields(named)],
        lambda: named.__match_args__,
        lambda: setattr(point(1.0), "x", 2.0),
        lambda: setattr(named(1.0), "other", 2.0),
        lambda: delattr(point(1.0), "x"),
        lambda: setattr(count(), "value", 2),
        lambda: copy.deepcopy(named(1.0, name="a")),
        lambda: type("Sub", (point,), {})(1.0).x,
        lambda: setattr(type("Sub", (point,), {})(1.0), "extra", 1),
        lambda: setattr(type("Sub", (point,), {})(1.0), "x", 1),
        lambda: count(1).__class__.__doc__,
    ]
    return [answer(one) for one in asked]


def answer(ask):
    try:
        return str(ask())
    except (TypeError, AttributeError, ValueError) as error:  # FrozenInstanceError is an AttributeError
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("at", range(31))
def test_the_quick_dataclass_answers_as_the_standard_one_does(at):
    quick, standard = (answers(kind)[at] for kind in KINDS.values())
    assert standard == quick


@dataclass(frozen=True)
class Pickled:
    """Known by its name in this module."""

    value: int


def test_an_instance_survives_pickling_and_is_equal():
    assert Pickled(1) == pickle.loads(pickle.dumps(Pickled(1)))  # noqa: S301 - our own


def test_a_value_that_holds_itself_is_shown_without_end():
    items = []
    items.append(Pickled(items))
    assert "..." in str(items[0])


def test_the_start_of_a_run_uses_the_quick_dataclass(tmp_path):
    """Compiling the functions of all classes took a fifth of the time of `ttlaunch plan`."""
    import subprocess  # noqa: PLC0415 - only here
    import sys  # noqa: PLC0415

    code = """
import dataclasses, sys
standard, slow = dataclasses.dataclass, []
def noting(cls=None, /, **options):
    if options.get("init", True):
        frame = sys._getframe(1)
        slow.append(frame.f_globals["__name__"])
    return standard(cls, **options)
dataclasses.dataclass = noting
from ttlaunch.cli.main import main
sys.argv = ["ttlaunch", "plan", "-n", "2", "--", "true"]
try:
    main()
finally:
    print(sorted({name for name in slow if name.startswith("ttlaunch")}), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert "[]" == done.stderr.splitlines()[-1]
