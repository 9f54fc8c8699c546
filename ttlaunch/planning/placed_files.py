"""Render the placement that `ttlaunch place` proposes: hosts in their new order, and bindings with their new ranks.

Rows of bindings are copied from the user's own file, so that `$VAR` in a value is not expanded. The mesh graph descriptor
is not copied; the new file refers to it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ttlaunch.diagnostics import Blame, Diagnostic
from ttlaunch.diagnostics.diagnostic import mistake_at
from ttlaunch.planning.place import Proposal, render_cost
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.nodes import plain
from ttlaunch.spec.located.yaml import parse_yaml
from ttlaunch.spec.topology.model import Host, Topology


def render_placed_files(
    topology: Topology, proposal: Proposal, *, recipe: str, folder: Path
) -> dict[str, str] | Diagnostic:
    """Render `hosts.txt` and `rank_bindings.yaml` for `folder`, an absolute path."""
    sources = {binding.span.source.name: binding.span.source for binding in topology.bindings}
    if len(sources) != 1:
        message = f"the bindings of configuration `{topology.name}` come from {len(sources)} files; `place` can write only one"
        return _unwritable(topology, message, label="this one is from the first file")
    if any(binding.subcontext_id is not None or binding.mesh_graph_path for binding in topology.bindings):
        message = f"the bindings of configuration `{topology.name}` have sub-contexts or descriptors of their own"
        return _unwritable(topology, message, label="`place` can write only bindings without these")
    root, _ = parse_yaml(next(iter(sources.values())), codes=TOPOLOGY)
    assert root is not None  # noqa: S101 - it was read before
    written = plain(root)
    rows = {row["rank"]: row for row in written["rank_bindings"]}
    costs = f"{render_cost(proposal.before)} to {render_cost(proposal.after)}"
    why = f"# Placed for {recipe}: the cost (Σ weight ÷ channels over the links between ranks that communicate) changes from {costs}.\n"
    hosts = why + "# Ranks take the slots in the order of this file.\n" + _hosts_text(proposal.hosts)
    new_rows = [{**rows[binding.rank], "rank": rank} for rank, binding in enumerate(proposal.bindings)]
    content = {**written, "rank_bindings": new_rows, "mesh_graph_desc_path": _descriptor(topology, folder)}
    bindings = why + "# Each host keeps its meshes; hosts.txt beside this file has the hosts in this order.\n"
    return {"hosts.txt": hosts, "rank_bindings.yaml": bindings + _yaml(content)}


def _unwritable(topology: Topology, message: str, *, label: str) -> Diagnostic:
    return mistake_at("P009", message, topology.bindings[0].span, label=label, blame=Blame.COMMAND_LINE)


def _hosts_text(hosts: tuple[Host, ...]) -> str:
    return "".join(
        f"{host.user + '@' if host.user else ''}{host.name} slots={host.slots}"
        f"{f' max_slots={host.max_slots}' if host.max_slots is not None else ''}\n"
        for host in hosts
    )


def _descriptor(topology: Topology, folder: Path) -> str:
    """Return the descriptor's path: relative to `folder` if it is at most two levels up, else absolute."""
    assert topology.mesh_graph_path is not None  # noqa: S101 - there are bindings
    near = os.path.relpath(topology.mesh_graph_path, folder)
    return near if near.count("../") <= 2 else str(topology.mesh_graph_path)  # noqa: PLR2004 - parents


def _yaml(content: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120)
    return text
