"""Whether the hosts of a cluster have room for a number of ranks."""

from ttlaunch.diagnostics import Diagnostic, Label
from ttlaunch.diagnostics.count import counted
from ttlaunch.spec.topology.model import Topology


def more_ranks_than_slots(topology: Topology, ranks: int) -> Diagnostic:
    """Return the diagnostic for `--ranks N` with fewer slots than that."""
    offered = counted(len(topology.slots), "slot")
    message = f"`--ranks {ranks}` was given but the hosts offer {offered}"
    hint = f"`--ranks {len(topology.slots)}`, or more slots: a slot is room for one rank"
    return Diagnostic("P002", message, Label(topology.hosts[-1].slots_span, f"{offered} in all"), hints=(hint,))
