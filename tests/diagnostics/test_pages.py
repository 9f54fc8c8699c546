"""Every code has a page, and every example of a topology code shows its code and no other."""

import re
from pathlib import Path

import pytest

import ttlaunch
from ttlaunch.diagnostics.explain import Page, known_codes, load_page
from ttlaunch.spec.topology.load import load_topology

SOURCES = Path(ttlaunch.__file__).parent
GOOD = {
    "hosts.txt": "loudbox-01 slots=1\nloudbox-02 slots=1\n",
    "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [{name: lbox, type: Mesh, topology: [1, 8]}]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
""",
    "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
""",
}


def page(code: str) -> Page:
    found = load_page(code)
    assert found is not None
    return found


def codes_in_sources() -> set[str]:
    texts = [path.read_text() for path in SOURCES.rglob("*.py") if path.name != "explain.py"]
    return set(re.findall(r'"([TCPHSR][0-9]{3})"', "\n".join(texts)))


@pytest.mark.parametrize("code", [code for code in known_codes() if code.startswith("T")])
def test_the_example_of_a_page_shows_its_code_and_no_other(code, tmp_path):
    assert page(code).files
    for name, content in page(code).contents(GOOD).items():
        (tmp_path / name).write_bytes(content)
    loaded = load_topology(tmp_path, name="example", environment={}, working_folder=tmp_path)
    assert {code} == {diagnostic.code for diagnostic in loaded.diagnostics}


def test_every_topology_code_has_a_page_and_every_page_its_code():
    used = {code for code in codes_in_sources() if code.startswith("T")}
    assert used == {code for code in known_codes() if code.startswith("T")}


def test_every_code_in_the_sources_has_a_page():
    assert codes_in_sources() - set(known_codes()) == set()


def test_a_page_has_its_title_and_its_four_sections():
    headings = ["What it checks", "Why it matters", "Example", "Repair"]
    for code in known_codes():
        found = page(code)
        assert found.title, code
        assert found.text.startswith(f"# {code}: {found.title}\n")
        assert (code, headings) == (code, re.findall(r"^## (.+)$", found.text, re.MULTILINE))


def test_a_code_is_found_in_any_letter_case():
    assert page("T011") == page(" t011 ")


@pytest.mark.parametrize("code", ["T999", "", "../T011", "T011.md", "hello"])
def test_what_is_no_code_has_no_page(code):
    assert load_page(code) is None


def test_flags_of_an_example_say_what_markdown_cannot_show():
    assert page("T010").files[0].content == b"loudbox-01 slots=1\r\nloudbox-02 slots=1\r\n"
    assert page("T009").files[0].content == b"\xef\xbb\xbfloudbox-01 slots=1\nloudbox-02 slots=1\n"
    assert "train.yaml" not in page("C001").contents({})
