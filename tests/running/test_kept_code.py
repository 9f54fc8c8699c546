"""The code that runs keep: once by content, without secrets, and checked when it is read back."""

import hashlib
import json
import os
import stat
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ttlaunch import contract
from ttlaunch.diagnostics import Severity
from ttlaunch.planning.launch_plan import CommandProgram, RecipeProgram
from ttlaunch.running.readers.repeat import Origin, changed_code, restore_package, restore_program
from ttlaunch.running.runs import kept_code, record_inputs
from ttlaunch.running.runs.kept_code import (
    KeptCodeError,
    collect_unused,
    open_store,
    package_tree,
    program_tree,
    tree_id,
)
from ttlaunch.running.runs.registry import find_registry

KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----\n"


@pytest.fixture
def recipe(here):
    folder = here / "mine"
    folder.mkdir()
    (folder / "recipe.py").write_text("RECIPE = 1\n")
    (folder / "trainer.py").write_text("def worker(): ...\n")
    (folder / "tool.sh").write_text("true\n")
    (folder / "tool.sh").chmod(0o755)
    return RecipeProgram("mine", str(folder), "all", {}, None)


@pytest.fixture
def runs(here):
    (here / "runs").mkdir()
    return here / "runs"


@pytest.fixture
def started(runs, monkeypatch):
    """`started(program)`: the origin of a run that this user has started here and whose code is kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(runs.parent / "state"))

    def start(program, *, name="2026-a", is_registered=True):
        with open_store(runs) as store:
            kept = {"program": store.keep(program_tree(program, runs.parent)), "package": None}
        (runs / name).mkdir()
        (runs / name / contract.CODE_FILE).write_text(json.dumps({"kept": kept}))
        if is_registered:
            find_registry(os.environ).enter((runs / name).resolve(), name="r", plan_hash="h", ranks=1)
        is_command = isinstance(program, CommandProgram)
        target, *arguments = program.command if is_command else [program.folder]
        return Origin(
            run_id=name,
            working_folder=runs.parent,
            target=target,
            is_command=is_command,
            arguments=tuple(arguments),
            config_file=None,
            data=None,
            resume=None,
            world_size=1,
            sha256=None,
            commit=None,
            tree=None,
            versions={},
            folder=runs / name,
            plan_hash="h",
            kept=kept,
        )

    return start


def objects(runs):
    return {path: path.read_bytes() for path in runs.glob(".code-*/objects/*/*")}


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_recipe_is_restored_as_it_was_with_the_rights_of_its_files(recipe, started, here):
    origin = started(recipe)
    before = contents(here / "mine")
    (here / "mine/trainer.py").write_text("changed\n")
    place = restore_program(origin).target
    assert before == contents(here.joinpath(place))
    assert place.endswith("/mine")
    assert os.access(f"{place}/tool.sh", os.X_OK)
    assert not os.access(f"{place}/recipe.py", os.X_OK)


def test_a_file_is_stored_once_whatever_the_number_of_runs(recipe, started, runs, here):
    started(recipe, name="2026-a")
    first = objects(runs)
    started(recipe, name="2026-b")
    assert first.keys() == objects(runs).keys()
    (here / "mine/trainer.py").write_text("changed\n")
    started(recipe, name="2026-c")
    assert b"changed\n" in [content for path, content in objects(runs).items() if path not in first]
    assert len(objects(runs)) == len(first) + 2  # the file, and the list of files


def test_nobody_else_can_open_what_is_kept(recipe, started, runs):
    origin = started(recipe)
    restore_program(origin)
    store = next(runs.glob(".code-*"))
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in [store, *store.rglob("*")]}
    assert [] == [path for path, mode in found.items() if mode & 0o077]
    assert {0o600, 0o700} == set(found.values())


def test_secrets_are_never_kept_however_they_are_named(recipe, runs, here):
    folder = here / "mine"
    (folder / "prod.env").write_text("TOKEN=canary")
    (folder / "notes.txt").write_text(f"remember\n{KEY}")
    (here / "id_rsa").write_text("canary")
    (folder / "data.txt").symlink_to(here / "id_rsa")
    (folder / ".ttlaunchignore").write_text("!prod.env\n")  # sync would send it; a copy that stays is another thing
    with open_store(runs) as store:
        kept = store.keep(program_tree(recipe, here))
    assert {"mine/data.txt", "mine/notes.txt", "mine/prod.env"} == set(kept["withheld"])
    assert [] == [path for path, content in objects(runs).items() if b"canary" in content or b"PRIVATE" in content]


def test_a_script_is_kept_with_what_it_imports_from_its_folder_and_nothing_else(here):
    (here / "work").mkdir()
    files = {
        "train.py": "import sys, torch\nimport model, deep.er.part\nfrom package import one\n",
        "model.py": "def f():\n    from layers import Layer\n",
        "layers.py": "import model\n",
        "deep/er/part.py": "",
        "package/__init__.py": "from . import two\n",
        "package/one.py": "from .two import x\nfrom ..model import y\n",
        "package/two.py": "",
        "package/three.py": "",
        "unused.py": "",
        "broken.py": "(",
        "weights.bin": "",
    }
    for name, text in files.items():
        (here / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "work" / name).write_text(text)
    tree = program_tree(CommandProgram("x", ("python", "-u", "work/train.py", "--lr", "3")), here)
    assert "work/train.py" == tree.script
    unused = {"package/three.py", "unused.py", "broken.py", "weights.bin"}
    assert files.keys() - unused == tree.files.keys()


def test_a_changed_script_is_noticed_and_the_kept_one_takes_its_place_in_the_command(here, started):
    (here / "x.py").write_text("import helper\n")
    (here / "helper.py").write_text("1\n")
    origin = started(CommandProgram("x", ("python", "-u", str(here / "x.py"), "x.py", "7")))
    assert changed_code(origin) is None
    (here / "helper.py").write_text("2\n")
    assert f"the script {here / 'x.py'} or a file that it imports has changed" == changed_code(origin)
    restored = restore_program(origin)
    prefix, script, *rest = restored.arguments
    assert ("python", "-u", ["x.py", "7"]) == (restored.target, prefix, rest)
    assert {"x.py": "import helper\n", "helper.py": "1\n"} == contents(here.joinpath(script).parent)
    (here / "x.py").unlink()
    assert f"the script {here / 'x.py'} is no longer there" == changed_code(origin)


@pytest.mark.parametrize("command", [("hostname",), ("python", "-c", "print(1)"), ("python", "missing.py")])
def test_a_program_that_is_no_script_of_this_machine_keeps_none(here, command):
    assert program_tree(CommandProgram("x", command), here) is None


def test_a_changed_file_of_the_store_is_refused_and_never_run(recipe, started, runs, here):
    origin = started(recipe)
    (here / "mine/trainer.py").write_text("changed\n")
    (path,) = [path for path, content in objects(runs).items() if content == b"def worker(): ...\n"]
    path.write_text("def worker(): hack()\n")
    with pytest.raises(KeptCodeError, match="was changed"):
        restore_program(origin)
    path.unlink()
    with pytest.raises(KeptCodeError, match="no such file"):
        restore_program(origin)


@pytest.mark.parametrize("change", ["edited", "added", "linked"])
def test_restored_files_that_were_changed_are_restored_again(recipe, started, change, here):
    origin = started(recipe)
    place = here.joinpath(restore_program(origin).target)
    if change == "linked":
        (place / "trainer.py").rename(here / "elsewhere.py")
        (place / "trainer.py").symlink_to(here / "elsewhere.py")
    else:
        (place / ("trainer.py" if change == "edited" else "torch.py")).write_text("hack()\n")
    again = here.joinpath(restore_program(origin).target)
    assert again != place
    assert contents(here / "mine") == contents(again)
    assert not (again / "trainer.py").is_symlink()


@pytest.mark.parametrize("path", ["../x.py", "/x.py", "a/../../x.py", "."])
def test_a_tree_that_names_files_outside_of_itself_is_refused(runs, path):
    with open_store(runs) as store:
        manifest = json.dumps({"files": {path: ["0" * 64, False]}}).encode()
        name = hashlib.sha256(manifest).hexdigest()
        store._write(manifest, name)
        with pytest.raises(KeptCodeError, match="names a file outside the tree"):
            store.restore(name)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"files": {"a": 1}}', b"no json", b'{"files": {"a": ["x", 0]}}'])
def test_a_tree_that_is_none_is_refused(runs, content):
    with open_store(runs) as store:
        name = hashlib.sha256(content).hexdigest()
        store._write(content, name)
        with pytest.raises(KeptCodeError):
            store.restore(name)
    with open_store(runs) as store, pytest.raises(KeptCodeError, match="names no tree"):
        store.restore("../../etc/passwd")


def test_code_of_a_run_that_this_user_has_not_started_here_is_never_restored(recipe, started, here):
    origin = started(recipe, is_registered=False)
    (here / "mine/trainer.py").write_text("changed\n")
    with pytest.raises(KeptCodeError, match="has not started it here"):
        restore_program(origin)


def test_a_store_that_others_can_open_is_not_used(runs, here):
    (runs / f".code-{os.geteuid()}").mkdir(mode=0o755)
    with pytest.raises(KeptCodeError, match="only this user can open"), open_store(runs):
        pass
    (runs / f".code-{os.geteuid()}").rmdir()
    (runs / f".code-{os.geteuid()}").symlink_to(here)
    with pytest.raises(KeptCodeError), open_store(runs):
        pass


def test_an_error_of_who_uses_the_store_stays_what_it_is(runs):
    with pytest.raises(FileNotFoundError), open_store(runs):
        (runs / "missing").read_text()


def test_data_in_the_folder_of_a_recipe_are_too_large_to_be_kept(recipe, runs, here, monkeypatch):
    monkeypatch.setattr(kept_code, "_MOST_BYTES", 1000)
    (here / "mine/data.bin").write_bytes(b"x" * 1001)
    with open_store(runs) as store, pytest.raises(KeptCodeError, match="more than 1"):
        store.keep(program_tree(recipe, here))
    assert {} == objects(runs)


def test_a_large_recipe_is_kept_with_a_warning_when_it_is_stored_and_not_with_every_run(
    recipe, runs, here, monkeypatch
):
    monkeypatch.setattr(kept_code.Store, "keep_package", lambda _store: "0" * 64)
    plan = SimpleNamespace(working_folder=str(here), program=recipe)

    def keep():
        with ExitStack() as stack:
            kept, found = record_inputs._keep_code(plan, runs, stack)
        return kept and kept["program"]["bytes"], [(one.code, one.severity, one.message) for one in found]

    assert [] == keep()[1]
    (here / "mine/data.bin").write_bytes(b"x" * 5_000_000)
    size, found = keep()
    assert size > 5_000_000
    assert [
        ("P053", Severity.WARNING, "5.0 MB of code are kept with this run, and again whenever they change")
    ] == found
    assert (size, []) == keep()
    monkeypatch.setattr(kept_code, "_MOST_BYTES", 1000)
    reason = "its files have 5.0 MB, more than 1.0 kB"
    assert (None, [("P053", Severity.WARNING, f"the code of this run is not kept: {reason}")]) == keep()


def test_nothing_is_kept_on_a_disk_that_is_nearly_full(recipe, runs, here, monkeypatch):
    monkeypatch.setattr(kept_code, "_LEFT_BYTES", 10**18)  # more than this disk has
    with open_store(runs) as store, pytest.raises(KeptCodeError, match=f"the disk of {runs} has only .* left"):
        store.keep(program_tree(recipe, here))
    assert {} == objects(runs)


def test_ttlaunch_itself_is_kept_and_is_not_read_again_before_it_changes(runs, monkeypatch):
    with open_store(runs) as store:
        name = store.keep_package()
        monkeypatch.setattr(store, "keep", lambda _tree: pytest.fail("the files were read again"))
        assert name == store.keep_package() == tree_id(package_tree())
        place = store.restore(name)
    assert (place / "ttlaunch/cli/repro.py").is_file()
    assert (place / "recipes/data_parallel/trainer.py").is_file()


def test_the_present_ttlaunch_needs_no_restored_one_and_a_former_one_does(recipe, started):
    origin = started(recipe)
    assert restore_package(replace(origin, kept={"package": tree_id(package_tree())})) is None
    former = origin.kept["program"]["tree"]
    assert former == restore_package(replace(origin, kept={"package": former})).name
    with pytest.raises(KeptCodeError, match="has not started it here"):
        restore_package(replace(origin, plan_hash="other", kept={"package": former}))


def test_what_no_run_names_any_more_is_collected_and_all_else_stays(recipe, started, runs, here):
    first = started(recipe, name="2026-a")
    (here / "mine/trainer.py").write_text("a second one\n")
    second = started(recipe, name="2026-b")
    places = [here.joinpath(restore_program(origin).target) for origin in (first, second)]
    assert 0 == collect_unused(runs)
    (runs / "2026-a" / contract.CODE_FILE).unlink()
    before = len(objects(runs))
    assert collect_unused(runs) > 0
    assert before - 2 == len(objects(runs))
    assert [False, True] == [place.is_dir() for place in places]
    assert contents(places[1]) == contents(here / "mine")


def test_nothing_is_collected_while_a_run_is_being_started_or_cannot_be_read(recipe, started, runs):
    started(recipe)
    (runs / "2026-a" / contract.CODE_FILE).unlink()
    with open_store(runs):
        assert 0 == collect_unused(runs)
    (runs / "2026-a" / contract.CODE_FILE).write_text("{")
    assert 0 == collect_unused(runs)
    (runs / "2026-a" / contract.CODE_FILE).write_text("{}")
    assert collect_unused(runs) > 0
    assert {} == objects(runs)
