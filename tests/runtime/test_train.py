"""`ttlaunch.train`, from which trainers import, as people and tools see it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ttlaunch.recipe
import ttlaunch.runtime
import ttlaunch.train
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter

SOURCE = ast.parse(Path(ttlaunch.train.__file__).read_text(encoding="utf-8"))


def test_dir_shows_the_public_names_and_no_other():
    assert sorted(ttlaunch.train.__all__) == dir(ttlaunch.train) == dir(ttlaunch.runtime)
    assert sorted(set(ttlaunch.train.__all__)) == sorted(ttlaunch.train.__all__)


def test_a_name_is_the_same_object_from_both_places_and_where_tools_are_told():
    told = [
        (alias.name, node.module)
        for node in ast.walk(SOURCE)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    homes = {name: [home for one, home in told if one == name] for name in ttlaunch.train.__all__}
    assert {1} == {len(found) for found in homes.values()}
    for name, [home] in homes.items():
        found = getattr(ttlaunch.train, name)
        assert getattr(ttlaunch.runtime, name) is found, name
        assert getattr(sys.modules[home], name) is found, name


@pytest.mark.parametrize("module", [ttlaunch.train, ttlaunch.recipe])
def test_tools_see_every_name_as_offered_and_no_other(module):
    """A type checker takes an import for private unless it is written `a as a`."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "ttlaunch." in node.module]
    offered = [alias.asname for node in imports for alias in node.names if alias.asname == alias.name]
    star: dict[str, object] = {}
    exec(f"from {module.__name__} import *", star)  # noqa: S102  what a user may write
    assert sorted(offered) == sorted(star.keys() - {"__builtins__"})
    assert sum(len(node.names) for node in imports) == len(set(offered))


@pytest.mark.parametrize(("old", "new"), ttlaunch.train.OLD_NAMES.items())
def test_a_trainer_that_imports_a_former_name_gets_what_it_is_called_now(old, new):
    now = getattr(ttlaunch.train, new)
    assert getattr(ttlaunch.train, old) is now
    assert getattr(ttlaunch.runtime, old) is now
    assert old not in dir(ttlaunch.train)


def test_a_trainer_that_counts_in_the_ledger_counts_traffic():
    ctx = object.__new__(ttlaunch.train.RankContext)
    ctx.traffic = TrafficCounter()
    ctx.ledger.note(owned_values=3)
    assert {"owned_values": 3} == ctx.traffic._facts


@pytest.mark.parametrize("package", [ttlaunch.train, ttlaunch.runtime])
def test_a_misspelled_name_is_none_of_its_attributes(package):
    with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'bulid_model'"):
        package.bulid_model  # noqa: B018


def test_torch_is_not_loaded_before_a_name_is_asked_for():
    """A rank checks its world first; and the modules inside are found without any name of a trainer's."""
    code = "import sys, ttlaunch.train, ttlaunch.runtime; from ttlaunch.runtime import world; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "False\n" == answer.stdout


@pytest.mark.slow
def test_a_type_checker_sees_every_name_with_its_type(tmp_path):
    names = sorted(ttlaunch.train.__all__)
    lines = ["import ttlaunch.runtime", "import ttlaunch.train"]
    lines += [f"reveal_type(ttlaunch.{place}.{name})" for place in ("train", "runtime") for name in names]
    lines += ["ttlaunch.train.bulid_model", "ttlaunch.runtime.bulid_model"]
    trainer = tmp_path / "trainer.py"
    trainer.write_text("\n".join(lines) + "\n", encoding="utf-8")
    here = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(trainer)]
    answer = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False, timeout=280)
    told = re.findall(r'note: Revealed type is "(.*)"', answer.stdout)
    errors = re.findall(r"error: (.*?)  \[", answer.stdout)
    assert 2 * len(names) == len(told), answer.stdout[-2000:]
    half = dict(zip(names, told, strict=False))
    assert told[len(names) :] == list(half.values())
    assert [name for name, kind in half.items() if kind in {"Any", "object", "builtins.object"}] == []
    assert half["build_model"].endswith("-> ttlaunch.runtime.model.model.Model")
    assert "ttlaunch.runtime.context.RankContext" in half["RankContext"]
    assert half["global_norm"].replace("builtins.", "") == "def (squared_norms: typing.Sequence[float]) -> float"
    assert all("bulid_model" in error for error in errors)
    assert 2 == len(errors)
