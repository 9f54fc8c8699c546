"""The page's files: nothing from elsewhere, uPlot as it was published, and every module in the wheel (X9)."""

import hashlib
import re
import zipfile
from importlib.util import find_spec
from pathlib import Path

import ttlaunch
from ttlaunch.dashboard.page import FILES, SCRIPTS, page_files
from ttlaunch.serving import page as chat

ROOT = Path(ttlaunch.__file__).parent.parent

UPLOT = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of `dist/uPlot.iife.min.js` and `dist/uPlot.min.css` in uplot 1.6.32 of the npm registry."""


def test_uplot_is_what_was_published_and_has_its_licence_beside_it():
    assert UPLOT == {name: hashlib.sha256((FILES / name).read_bytes()).hexdigest() for name in UPLOT}
    assert (FILES / "uplot.LICENSE").read_text().startswith("The MIT License (MIT)")


def test_no_file_of_the_page_names_another_server():
    for path in FILES.iterdir():
        if path.name.startswith("uplot"):
            continue
        named = set(re.findall(r"https?://[^\s\"'`)]+", path.read_text()))
        assert named <= {"http://www.w3.org/2000/svg"}, path.name


def test_every_module_is_offered_and_imports_only_those_before_it():
    assert {f"/page/{name}.js" for name in SCRIPTS} | {"/page/uplot.js"} == {
        path for path in page_files() if path.endswith(".js")
    }
    for at, name in enumerate(SCRIPTS):
        imported = re.findall(r"from \"\./(\w+)\.js\"", (FILES / f"{name}.js").read_text())
        assert set(imported) <= set(SCRIPTS[:at]), name


def test_a_built_wheel_has_every_file_of_both_pages_with_its_bytes(tmp_path, skip_or_fail):
    if find_spec("hatchling") is None:
        skip_or_fail("no hatchling on this machine, which builds wheels")
    from hatchling.builders.wheel import WheelBuilder  # noqa: PLC0415 - so that its absence is a skip

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as packed:
        for folder in (FILES, Path(chat.__file__).with_name("files")):
            for path in folder.iterdir():
                assert path.read_bytes() == packed.read(str(path.relative_to(ROOT))), path.name


def test_no_text_ever_becomes_html():
    for name in SCRIPTS:
        text = (FILES / f"{name}.js").read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
        ), name


def test_no_name_is_taken_twice_because_a_saved_page_has_all_modules_in_one_script():
    declared = re.compile(r"^(?:export )?(?:async )?(?:const|let|class|function\*?) (\w+)", re.MULTILINE)
    names = [name for module in SCRIPTS for name in declared.findall((FILES / f"{module}.js").read_text())]
    assert [] == sorted(name for name in set(names) if names.count(name) > 1)


def test_nothing_moves_for_readers_who_do_not_want_that():
    style = (FILES / "page.css").read_text()
    outside = re.sub(r"@media \(prefers-reduced-motion: no-preference\) \{(?:[^{}]*\{[^{}]*\})*\s*\}", "", style)
    assert "transition" in style
    assert not re.search(r"transition|animation|@keyframes|scroll-behavior", outside)
    assert not any(
        re.search(r"\.animate\(|behavior: ?\"smooth\"", (FILES / f"{name}.js").read_text()) for name in SCRIPTS
    )
