"""Throw mutated hostfiles, YAML and text format at the parsers: diagnostics only, and time linear in the size.

Each input is a seed with a few stretches deleted, doubled, exchanged with another seed's or replaced by scraps, and is
made from its number alone, so any of them can be made again: `--from N --count 1`. Every now and then one is a bomb:
deep nesting, aliases that unfold, lines of ten megabytes. Progress is kept in `--state`, where a run goes on.

    python benchmarks/topology_fuzz.py [--count 1000000] [--from 0] [--state FILE]
"""

import argparse
import json
import random
import sys
import traceback
from collections import Counter
from pathlib import Path
from time import perf_counter

from ttlaunch.diagnostics import Diagnostic, Source, has_errors, render
from ttlaunch.spec.topology.convert import convert
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.mgd_textproto import parse_mesh_graph_textproto
from ttlaunch.spec.topology.mgd_yaml import parse_mesh_graph
from ttlaunch.spec.topology.sub_contexts import parse_any_bindings

HOSTS = [
    "metal-wh-01 slots=1\nmetal-wh-04 slots=1\n",
    "# lab\njoe@10.0.0.1 slots=4 max_slots=8\nnode[01-16,20] slots=8\nnode30\nnode30\n",
    "rank 0=a slot=0\nrank 1=b slot=0\n",
    "a.x.org slots = 2 // two\n\tb slots=03\nfe80::1 max-slots=2\n",
]
YAMLS = [
    (
        "ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2,}}\nBoard: [{name: box, type: TORUS_X, "
        "topology: [2, 4]}]\nMesh: [\n{id: 0, board: box, device_topology: [2, 4], host_topology: [1, 1]},\n"
        "{id: 1, board: box, device_topology: [4, 4], host_topology: [2, 1]}]\nRelaxedGraph: [\n  [M0, M1, 2],\n]\n"
    ),
    (
        "ChipSpec:\n  arch: blackhole\n  ethernet_ports:\n    N: 4\n    E: 4\n    S: 4\n    W: 4\nBoard:\n  - name: 2x4\n"
        "    type: Mesh\n    topology: [2, 4]\nMesh:\n  - {id: 0, board: 2x4, device_topology: [2, 4], host_topology: [1, 1]}"
        "\n  - {id: 1, board: 2x4, device_topology: [2, 4], host_topology: [1, 1]}\n"
        "Graph:\n  - [[M0, D1], [M1, D1], 1]\n  - [[M0, D5], [M1, D5], 1]\n"
    ),
    (
        "ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2, Z: 1}}\nBoard: [{name: b, type: Mesh, "
        "topology: [1, 2]}]\nMesh: [{id: 0, board: b, device_topology: [2, 2], host_topology: [2, 1], host_ranks: [[0], "
        "[1]]}, {id: 1, board: b, topology: [2, 1], host_ranks: [[0], [1]]}]\n"
        "Graph: [\n  [[0, E0], [1, W0]],\n  [[1, W0], [0, E0]],\n]\n"
    ),
    (
        'rank_bindings:\n  - rank: 0\n    mesh_id: 1\n    mesh_host_rank: 0\n    env_overrides: {TT_VISIBLE_DEVICES: "0,1"}'
        '\n  - {rank: 1, mesh_id: 0}\nglobal_env:\n  HOME: "$HOME/x"\nmesh_graph_desc_path: "mgd.yaml"\n'
    ),
]
TEXTPROTOS = [
    (
        'mesh_descriptors {\n  name: "M0"  arch: WORMHOLE_B0\n  device_topology { dims: [1, 8] dim_types: [LINE, RING] }\n'
        "  host_topology { dims: [1, 1] }\n  channels { count: 2 policy: RELAXED }\n}\ngraph_descriptors {\n"
        '  name: "G0" type: "FABRIC"\n  instances { mesh { mesh_descriptor: "M0" mesh_id: 0 } }\n'
        '  instances { mesh { mesh_descriptor: "M0" mesh_id: 1 } }\n  connections {\n'
        '    nodes { mesh { mesh_descriptor: "M0" mesh_id: 0 device_id: 3 } }\n'
        '    nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 device_id: 3 } }\n    channels { count: 2 }\n'
        '    directional: false\n  }\n}\ntop_level_instance { graph { graph_descriptor: "G0" graph_id: 0 } }\n'
    ),
    (
        "switch_descriptors: < name: 'S' arch: BLACKHOLE device_topology: { dims: 2, dims: 4 } channels { count: 1 } >\n"
        'mesh_descriptors { name: "M" arch: BLACKHOLE device_topology { dims: [4, 4] types: [RING, RING] } '
        "host_topology { dims: [2, 2] } channels { count: 3 } express_links { dim_idx: 0 pattern { start: 0 step: 2 } } }\n"
        'graph_descriptors { name: "G" type: "FABRIC" instances { mesh { mesh_descriptor: "M" } } '
        'instances { switch { switch_descriptor: "S" } } graph_topology { layout_type: ALL_TO_ALL channels { count: 1 } } }'
        '\ntop_level_instance { graph { graph_descriptor: "G" } }\npinnings { logical_fabric_node_id { mesh_id_regex: "0-3" '
        "chip_id: 0x0 } physical_asic_position { tray_id: 1 asic_location: 01 } }\n"
    ),
    (
        '# single\nmesh_descriptors { name: "\\x4d\\060" arch: CPU device_topology { dims: [1, 1] } host_topology '
        '{ dims: [1, 1] } channels { count: 1 } }\ntop_level_instance { mesh { mesh_descriptor: "M0" mesh_id: 0 } }\n'
    ),
]
SCRAPS = [*"[]{}<>:,;\"'\\#=-?!&*|%@`~$\t\n 0", "- ", ": ", "[[", "]]", "{{", "}}", "M0", "D9", "E0", "-1", "1e999", ".nan",
          "99999999999999999999", "0x", "08", "&a ", "*a", "<<: ", "!!set ", "---\n", "null", "true", "\x00", "\x1b",
          "\u2028", "\x85", "é", "\U0001f600", "slots=", "slots=0", "max_slots=1", "[1-99999]", "[1-65536]", "//", "a{",
          "a: [", "'\\'", "\\777", "mesh_id: 0 ", "rank: 0, ", "# "]  # fmt: skip
KINDS = {"hosts": HOSTS, "yaml": YAMLS, "bindings": YAMLS, "textproto": TEXTPROTOS, "convert": YAMLS + TEXTPROTOS}
BOMB_EVERY = 2_000
SMALLEST_RATE = 60_000
ALLOWED_S = 0.25
MOST_HOSTS_S = 4.0


def main() -> int:
    """Run, and print inputs per second, how many were accepted, and each crash or stall with its number."""
    parser = argparse.ArgumentParser(description="Fuzz the parsers of topology files.")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--from", dest="start", type=int, default=0)
    parser.add_argument("--state", type=Path, help="Keep the progress in this file, and go on from it.")
    options = parser.parse_args()
    start = options.start
    if options.state and options.state.exists():
        start = max(start, json.loads(options.state.read_text())["next"])
    tally: Counter[str] = Counter()
    failures: list[str] = []
    began = perf_counter()
    for number in range(start, options.start + options.count):
        problem = _try(number, tally)
        failures += [problem] if problem else []
        if options.state and number % 1000 == 999:
            options.state.write_text(json.dumps({"next": number + 1, "failures": failures}))
    took, done = perf_counter() - began, max(0, options.start + options.count - start)
    sys.stdout.write(f"{done} inputs from {start} in {took:.0f} s: {done / max(took, 1e-9):.0f} a second\n")
    for name in sorted(tally):
        sys.stdout.write(f"  {name:<22} {tally[name]:>8}\n")
    sys.stdout.write("\n".join(failures[:20]) + ("\n" if failures else ""))
    sys.stdout.write(f"crashes and stalls: {len(failures)}\n")
    return 1 if failures else 0


def make(number: int) -> tuple[str, str]:
    """The kind and the text of an input."""
    dice = random.Random(number)  # noqa: S311 - made again from its number
    kind = dice.choice(list(KINDS))
    if number % BOMB_EVERY == BOMB_EVERY - 1:
        return kind, _bomb(dice)
    text = dice.choice(KINDS[kind])
    for _ in range(dice.randint(0, 6)):
        first = dice.randint(0, len(text))
        last = min(len(text), first + dice.choice((0, 0, 1, 2, 8, 40)))
        match dice.randint(0, 3):
            case 0:
                piece = ""
            case 1:
                piece = text[first:last] * dice.choice((2, 3, 50))
            case 2:
                other = dice.choice(KINDS[kind])
                begin = dice.randint(0, len(other))
                piece = other[begin : begin + dice.randint(1, 60)]
            case _:
                piece = dice.choice(SCRAPS)
        text = text[:first] + piece + text[last:]
    return kind, text


def _bomb(dice: random.Random) -> str:
    size = dice.choice((1_000, 50_000, 500_000))
    aliases = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    aliases += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    unit = dice.choice(["[", "{a: ", "- ", "a{", "a: [", "a<", "? ", "&a [", "'", '"', "\\", "#", "a", " ", "0", "a=", "=",
                        "slots=1 ", "a slots=1\n", "n[1-65536]\n", "n[1-9,", "a: 1\n", "a: 1 ", "- a\n", '"\\', "[],"])  # fmt: skip
    long_line = "a: " + dice.choice(["x", "1", '"x', "[1,", " ", "é"]) * 10_000_000
    return dice.choice([unit * size, unit * size, aliases, long_line if dice.random() < 0.1 else unit * 100])


def _try(number: int, tally: Counter[str]) -> str | None:
    kind, text = make(number)
    source = Source("input", text)
    before = perf_counter()
    try:
        diagnostics = _parse(kind, source)
        took = perf_counter() - before
        render(diagnostics[:20])
    except Exception:  # noqa: BLE001 - any of them is the finding
        return f"input {number} ({kind}): {traceback.format_exc(limit=-1)[-400:]}"
    tally[f"{kind} {'refused' if has_errors(diagnostics) else 'accepted'}"] += 1
    # A range of hosts may stand for as many as are read at all.
    allowed = ALLOWED_S + len(text) / SMALLEST_RATE + (MOST_HOSTS_S if kind == "hosts" and "[" in text else 0)
    return f"input {number} ({kind}): {took:.1f} s for {len(text)} characters" if took > allowed else None


def _parse(kind: str, source: Source) -> list[Diagnostic]:
    match kind:
        case "hosts":
            return parse_hosts(source)[1]
        case "yaml":
            return parse_mesh_graph(source)[1]
        case "bindings":
            return parse_any_bindings(source, environment={"HOME": "/"})[1]
        case "textproto":
            return parse_mesh_graph_textproto(source)[1]
        case _:
            result = convert(source, to="yaml" if "descriptors" in source.text else "textproto")
            if result.text is not None:
                again = convert(Source("again", result.text), to="yaml")
                assert again.text is not None, [each.message for each in again.diagnostics]
            return result.diagnostics


if __name__ == "__main__":
    sys.exit(main())
