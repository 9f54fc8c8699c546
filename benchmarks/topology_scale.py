"""How long 10,000 ranks take to validate: hosts, descriptor (YAML or textproto) and bindings, against a bare parser.

The bar is three times `yaml.load` with libyaml of the same YAML bytes, which builds plain dictionaries, checks nothing
and knows no line numbers, and 500 MB of memory. `yaml.safe_load`, which most tools call, stands beside it, and so does
the same cluster in text format, whose descriptor is longer and which no YAML parser could read for comparison. All run
as they are called: `yaml.load` with the cycle collector on, as Python has it; ttlaunch pauses it while it reads.

    python benchmarks/topology_scale.py [--ranks 10000]
"""

import argparse
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import yaml

from ttlaunch.spec.topology.load import load_topology

_MOST_TIMES = 3.0
_MOST_MEGABYTES = 500


def main() -> int:
    """Print the table; the exit status says whether the bar was met."""
    parser = argparse.ArgumentParser(description="Time the validation of a large cluster.")
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = _write(folder, options.ranks)
        whole = [_timed(lambda form=form: _validate(folder, form), options.repeat) for form in ("yaml", "textproto")]
        # Before the other parsers run: the peak counts this process from its start.
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        texts = [files["mgd.yaml"], files["rank_bindings.yaml"].replace("textproto", "yaml")]
        fast = _timed(lambda: [yaml.load(text, yaml.CSafeLoader) for text in texts], options.repeat)
        slow = _timed(lambda: [yaml.safe_load(text) for text in texts], 1)
    size = sum(len(text) for text in files.values()) / 1e6
    lines = [
        f"{options.ranks} ranks, {size:.1f} MB of files, peak memory {megabytes:.0f} MB",
        f"yaml.load, libyaml          {fast:6.2f} s    1.0",
        f"yaml.safe_load              {slow:6.2f} s  {slow / fast:5.1f}",
        f"ttlaunch, YAML              {whole[0]:6.2f} s  {whole[0] / fast:5.1f}",
        f"ttlaunch, textproto         {whole[1]:6.2f} s  {whole[1] / fast:5.1f}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    met = whole[0] <= _MOST_TIMES * fast and megabytes < _MOST_MEGABYTES
    sys.stdout.write(f"bar of {_MOST_TIMES:g} times and {_MOST_MEGABYTES} MB: {'met' if met else 'MISSED'}\n")
    return 0 if met else 1


def _timed(work: Callable[[], object], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = perf_counter()
        work()
        best = min(best, perf_counter() - start)
    return best


def _validate(folder: Path, form: str) -> None:
    text = (folder / "rank_bindings.yaml").read_text()
    other = "textproto" if form == "yaml" else "yaml"
    (folder / "rank_bindings.yaml").write_text(text.replace(f"mgd.{other}", f"mgd.{form}"))
    loaded = load_topology(folder, name="large", environment={}, working_folder=folder)
    assert loaded.topology is not None, loaded.diagnostics[:3]
    assert loaded.diagnostics == []


def _write(folder: Path, ranks: int) -> dict[str, str]:
    reference = 'mesh {{ mesh_descriptor: "lbox" mesh_id: {} }}'.format
    files = {
        "hosts.txt": "".join(f"loudbox-{rank:05d} slots=1\n" for rank in range(ranks)),
        "mgd.yaml": "ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}\n"
        "Board: [{name: lbox, type: Mesh, topology: [1, 8]}]\nMesh: [\n"
        + "".join(
            f"  {{id: {rank}, board: lbox, device_topology: [1, 8], host_topology: [1, 1]}},\n" for rank in range(ranks)
        )
        + "]\nRelaxedGraph: [\n"
        + "".join(f"  [M{rank}, M{rank + 1}, 2],\n" for rank in range(ranks - 1))
        + "]\n",
        "mgd.textproto": 'mesh_descriptors {\n  name: "lbox"\n  arch: WORMHOLE_B0\n'
        "  device_topology { dims: [1, 8] }\n  host_topology { dims: [1, 1] }\n  channels { count: 2 }\n}\n"
        'graph_descriptors {\n  name: "G0"\n  type: "FABRIC"\n'
        + "".join(f"  instances {{ {reference(rank)} }}\n" for rank in range(ranks))
        + "".join(
            f"  connections {{\n    nodes {{ {reference(rank)} }}\n    nodes {{ {reference(rank + 1)} }}\n"
            "    channels { count: 2 policy: RELAXED }\n  }\n"
            for rank in range(ranks - 1)
        )
        + '}\ntop_level_instance { graph { graph_descriptor: "G0" graph_id: 0 } }\n',
        "rank_bindings.yaml": "rank_bindings:\n"
        + "".join(
            f'  - rank: {rank}\n    mesh_id: {rank}\n    env_overrides:\n      TT_VISIBLE_DEVICES: "0,1,2,3,4,5,6,7"\n'
            for rank in range(ranks)
        )
        + 'mesh_graph_desc_path: "mgd.yaml"\n',
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return files


if __name__ == "__main__":
    sys.exit(main())
