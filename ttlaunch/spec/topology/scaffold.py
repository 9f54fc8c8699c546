"""Write the three files of a new configuration, which are valid and explain themselves in comments.

A user changes the numbers in them and does not have to look up the format.
"""

import re
from dataclasses import replace

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, Severity
from ttlaunch.diagnostics.span import Source
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.mesh_graph import ARCHITECTURES, NOT_TENSTORRENT

_SOURCE = "--hosts"
_PLAIN = re.compile(r"[A-Za-z0-9_.@-]+\Z")
_COUNT = re.compile(r"[0-9]+\Z")


def parse_host_list(text: str) -> list[tuple[str, int]] | Diagnostic:
    """Read `a,b:2,c`: hosts with their number of slots, 1 without a number; or return a diagnostic."""
    hosts: list[tuple[str, int]] = []
    column = 1
    source = Source(_SOURCE, text)
    for part in text.split(","):
        host, slots = _split(part)
        problem = _problem(host, slots)
        if problem or host in dict(hosts):
            span = source.span(1, column, max(1, len(part)))
            problem = problem or "it is listed twice"
            message = f"`{_SOURCE} {shown(text)}`: `{shown(part)}` is not a host with a number of slots: {problem}"
            hint = "write hosts with commas between them: `--hosts a,b:2,c`"
            return Diagnostic(codes.HOST_NAME, message, Label(span, "expected `HOST` or `HOST:SLOTS`"), hints=(hint,))
        hosts.append((host, int(slots)))
        column += len(part) + 1
    _, found = parse_hosts(Source(_SOURCE, _lines(hosts)))
    if found:
        return replace(
            found[0], primary=Label(source.span(1, 1, len(text))), secondary=(), hints=(), severity=Severity.ERROR
        )
    return hosts


def scaffold(
    name: str, hosts: list[tuple[str, int]], *, device_shape: tuple[int, int] = (1, 8), arch: str = "wormhole_b0"
) -> dict[str, str]:
    """Return the files of a configuration in which each rank drives its own mesh.

    Args:
        name: The configuration's name, for the comments.
        hosts: The hosts, each with its number of slots.
        device_shape: Rows and columns of devices of each mesh.
        arch: One of `ARCHITECTURES`.

    Returns:
        The text of each file, by the file's name.

    Raises:
        ValueError: There is no host, or the architecture is unknown.
    """
    if not hosts or arch not in ARCHITECTURES:
        raise ValueError(f"a configuration needs a host and an architecture out of {', '.join(ARCHITECTURES)}")
    ranks = [host for host, slots in hosts for _ in range(slots)]
    return {
        "hosts.txt": _hosts_text(name, hosts),
        "mgd.yaml": _descriptor_text(name, len(ranks), device_shape=device_shape, arch=arch),
        "rank_bindings.yaml": _bindings_text(name, ranks, arch, devices=device_shape[0] * device_shape[1]),
    }


def scaffold_plain(name: str, hosts: list[tuple[str, int]]) -> dict[str, str]:
    """Return the files of a configuration of machines without Tenstorrent devices, which leaves the number of ranks open."""
    return {"hosts.txt": _hosts_text(name, hosts)}


def _split(part: str) -> tuple[str, str]:
    host, colon, slots = part.strip().partition(":")
    return host, slots if colon else "1"


def _problem(host: str, slots: str) -> str | None:
    """Return why a hostfile would not take this host, or None if it would."""
    if not _PLAIN.match(host):
        return "a host name has letters, digits, `-`, `_` and `.`"
    if not _COUNT.match(slots):
        return "a number of slots is a whole number from 1"
    _, found = parse_hosts(Source(_SOURCE, f"{host} slots={slots}"))
    return found[0].message if found else None


def _hosts_text(name: str, hosts: list[tuple[str, int]]) -> str:
    return f"""\
# {shown(name)}: the machines. One host a line, with room for `slots` ranks on it.
# Ranks take the slots in the order of this file: rank 0 the first, rank 1 the next, …
{_lines(hosts)}
"""


def _lines(hosts: list[tuple[str, int]]) -> str:
    return "\n".join(f"{host} slots={slots}" for host, slots in hosts)


def _descriptor_text(name: str, meshes: int, *, device_shape: tuple[int, int], arch: str) -> str:
    rows, columns = device_shape
    shape = f"[{rows}, {columns}]"
    mesh = f"{{id: %d, board: board, device_topology: {shape}, host_topology: [1, 1]}},"
    mesh_lines = "\n".join("  " + mesh % number for number in range(meshes))
    link_lines = "\n".join(f"  [M{number}, M{number + 1}, 2]," for number in range(meshes - 1))
    links = f"RelaxedGraph: [\n{link_lines}\n]" if link_lines else "RelaxedGraph: []"
    return f"""\
# {shown(name)}: the devices, and how they are cabled.

# The chip, and its ethernet ports to the north, east, south and west.
ChipSpec: {{
  arch: {arch},
  ethernet_ports: {{N: 2, E: 2, S: 2, W: 2}}
}}

# What one host holds: {rows} × {columns} devices.
Board: [
  {{name: board, type: Mesh, topology: {shape}}},
]

# A mesh is the grid of devices that one rank drives. device_topology = host_topology × the board's topology.
Mesh: [
{mesh_lines}
]

# Cables between meshes: two meshes, and how many ethernet channels join them. Each pair stands here once.
# A chain is assumed here; write what is really plugged in.
{links}
"""


def _bindings_text(name: str, ranks: list[str], arch: str, *, devices: int) -> str:
    rows = "\n".join(
        f"  - {{rank: {rank}, mesh_id: {rank}{_visible(ranks, rank, arch, devices=devices)}}}  # {host}"
        for rank, host in enumerate(ranks)
    )
    is_shared = "TT_VISIBLE_DEVICES" in rows
    shared = (
        "\n# Ranks that share a host each see the devices of their own mesh: write their real numbers."
        if is_shared
        else ""
    )
    home = '\n# Variables for every rank. $HOME is that of the machine that launches.\nglobal_env:\n  TT_METAL_HOME: "$HOME/tt-metal"\n'
    return f"""\
# {shown(name)}: which mesh each rank drives. Ranks count from 0 and take the slots of hosts.txt in order;
# `mesh_id` is the `id` of a mesh in mgd.yaml.{shared}
rank_bindings:
{rows}
{"" if arch == "cpu" else home}
# The descriptor, beside this file.
mesh_graph_desc_path: "mgd.yaml"
"""


def _visible(ranks: list[str], rank: int, arch: str, *, devices: int) -> str:
    """Return the rest of a row that gives a rank its share of the devices of a host where it is not alone."""
    if arch in NOT_TENSTORRENT or ranks.count(ranks[rank]) == 1:
        return ""
    first = ranks[:rank].count(ranks[rank]) * devices
    return f', env_overrides: {{TT_VISIBLE_DEVICES: "{",".join(map(str, range(first, first + devices)))}"}}'
