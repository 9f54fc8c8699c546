"""One way into the loader for all tests of topology files, so that its API may change and the cases stay."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ttlaunch.diagnostics import render
from ttlaunch.spec.topology.load import Loaded, load_topology

Files = Mapping[str, str | bytes | None]

GOOD = {
    "hosts.txt": "loudbox-01 slots=1\nloudbox-02 slots=1\n",
    "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [M0, M1, 2],
]
""",
    "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 1}
  - {rank: 1, mesh_id: 0}
mesh_graph_desc_path: "mgd.yaml"
""",
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Loaded]:
    """Load the good configuration with some files replaced; a file of None is left out."""

    def load_files(files: Files, *, environment: Mapping[str, str] | None = None) -> Loaded:
        for name, text in (GOOD | dict(files)).items():
            if text is not None:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_topology(tmp_path, name="lab", environment=environment or {}, working_folder=tmp_path)

    return load_files


@pytest.fixture
def check(load: Callable[..., Loaded]) -> Callable[..., None]:
    """Compare all diagnostics, word for word. An error means no topology, and the other way round."""

    def check_files(files: Files, expected: str, *, environment: Mapping[str, str] | None = None) -> None:
        loaded = load(files, environment=environment)
        actual = "".join(line.rstrip() + "\n" for line in render(loaded.diagnostics).splitlines())
        assert expected == actual
        assert ("error[" in actual) == (loaded.topology is None)

    return check_files


@pytest.fixture
def good() -> dict[str, str]:
    """The texts of a configuration without mistakes: two hosts, two meshes, one link."""
    return dict(GOOD)
