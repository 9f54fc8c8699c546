"""Which files and hosts a command line names beside `--on`: `--hostfile`, `--rank-bindings` and `--mpi-args`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.diagnostics import Diagnostic, shown, usage_mistake

if TYPE_CHECKING:
    from ttlaunch.app.run_spec import RunSpec
    from ttlaunch.diagnostics import Source


@dataclass(frozen=True)
class NamedFiles:
    """What was named.

    Attributes:
        hosts: The hosts of `--mpi-args`, as the text of a hostfile.
        passed: Words that go to the engine as they are.
    """

    hostfile: Path | None = None
    rank_bindings: Path | None = None
    hosts: "Source | None" = None
    passed: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether these, and not `--on`, describe the cluster."""
        return not (self.hostfile is None and self.rank_bindings is None and self.hosts is None)


def named_files(request: "RunSpec") -> tuple[NamedFiles, list[Diagnostic]]:
    """Sort what was typed; two names for one thing are a mistake."""
    found: list[Diagnostic] = []
    named = NamedFiles(request.hostfile, request.rank_bindings)
    ways = [f"`{name}`" for name, value in _options(request) if value]
    if request.mpi_args is not None:
        from ttlaunch.engines.choose import ENGINES

        words, found = ENGINES[0].parse_arguments(request.mpi_args)
        if words.hosts or words.hostfile:
            ways.append("`--mpi-args`")
            if request.hostfile:
                found.append(usage_mistake("`--hostfile` and `--mpi-args` both name hosts; one was expected"))
        hostfile = Path(words.hostfile) if words.hostfile else request.hostfile
        named = NamedFiles(hostfile, request.rank_bindings, words.hosts, words.passed)
    if ways and request.on != "local":
        message = (
            f"{' and '.join(ways)} and configuration `{shown(request.on)}` both describe a cluster; one was expected"
        )
        found.append(usage_mistake(message, f"leave out {' and '.join(ways)}, or the configuration"))
    return named, found


def _options(request: "RunSpec") -> tuple[tuple[str, Path | None], ...]:
    return (("--hostfile", request.hostfile), ("--rank-bindings", request.rank_bindings))
