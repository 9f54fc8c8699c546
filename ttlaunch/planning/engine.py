"""The interface of an engine to planning and to the rules about hosts; engines themselves are in `ttlaunch/engines/`.

An engine starts the ranks of a run; each engine, such as Open MPI, has a file in `ttlaunch/engines/`. Functions of planning
receive the engine as an object, and no code here names one.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ttlaunch.planning.launch_plan import EngineCommand, RankRow
from ttlaunch.quick_dataclass import dataclass

_LONGEST_ANSWER = 1000  # characters of what a program prints for `--version`


@dataclass(frozen=True)
class EngineSignature:
    """How an engine is recognised on any machine.

    It is plain data, because scripts on hosts use it, and they do not have the engines' code.

    Attributes:
        title: The engine's name for people, such as `Open MPI`.
        program: The command that starts ranks, looked for by this name and asked for its `--version`.
        version: Regular expression; its first group is the version in what the program answers.
        oldest: The first version that can be used.
        before: The first newer version that is refused, because its settings are not known yet.
        package: The Python package that contains the engine; empty if there is none.
        library: Regular expression for the version that the library loaded by mpi4py reports; empty if ranks need no
            library of the engine.
        abi: The probe's name for this library.
        detached: Names of its processes that detach from their parents, so that their own children look orphaned.
    """

    title: str
    program: str
    version: str
    oldest: tuple[int, ...]
    before: tuple[int, ...]
    package: str = ""
    library: str = ""
    abi: str = ""
    detached: tuple[str, ...] = ()

    def version_in(self, answer: str | None) -> tuple[int, ...] | None:
        """Find the version in what the program answered, such as `(5, 0, 11)`; None if another program answered."""
        match = re.search(self.version, (answer or "")[:_LONGEST_ANSWER])
        numbers = re.match(r"\d+(?:\.\d+)*", match[1]) if match else None  # `5.1.0` of `5.1.0rc2`
        return tuple(int(part) for part in numbers[0].split(".")) if numbers else None

    def refusal(self, version: tuple[int, ...]) -> str | None:
        """Return why a version cannot be used; None if it can."""
        if version < self.oldest:
            return f"{dotted(self.oldest)} or newer is needed"
        return f"older than {dotted(self.before)} is needed" if version >= self.before else None

    def as_json(self) -> dict[str, Any]:
        """Return the signature as a script on a host reads it."""
        return asdict(self)


def dotted(version: Sequence[int]) -> str:
    """Return a version as people write it."""
    return ".".join(str(part) for part in version)


@dataclass(frozen=True)
class OverHosts:
    """The data that an engine needs when ranks run on other machines than the launching one.

    Attributes:
        remote_folder: The folder for ttlaunch's files on a host; if not absolute, it is below the user's home there.
        networks: Networks for the ranks' messages, in CIDR notation; if empty, the engine chooses.
        control_networks: Networks for the messages of the engine's daemons, which must also reach the launching machine.
        has_rdma: Whether every host has an RDMA device, so that ranks must be free to use it.
    """

    remote_folder: str
    networks: tuple[str, ...] = ()
    control_networks: tuple[str, ...] = ()
    has_rdma: bool = False


@dataclass(frozen=True)
class RanksToStart:
    """The ranks that an engine is asked to start.

    Attributes:
        python: Interpreter that runs the shim on this machine.
        shim: Path of `shim.py` on this machine.
        rows: The ranks.
        slots: Host and number of slots, in the order of the hostfile, with `user@` where the hostfile has it.
        arguments: The user's own arguments for the engine's command. The engine omits its own settings that they set too.
        over_hosts: Data for a run over other machines, each of which has its own paths; None if all ranks run on this
            machine.
    """

    python: str
    shim: str
    rows: Sequence[RankRow]
    slots: Sequence[tuple[str, int]]
    arguments: Sequence[str] = ()
    over_hosts: OverHosts | None = None


class PlansCommands(Protocol):
    """An engine as planning uses it: it makes the command that starts the ranks."""

    def command(self, ranks: RanksToStart) -> EngineCommand:
        """Return the command line, files and variables that start one shim per rank; pure, equal for equal ranks."""
