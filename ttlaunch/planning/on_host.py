"""The plan as one host reads it: the same decisions, with that host's own paths in place of the launching machine's.

Users may have other names and homes on other hosts, and the code lies in a release folder there. So every path of the
plan that points into something that was copied is moved to where the copy lies; whatever else a value holds stays. The
hash stays that of the plan itself, so that every host can be seen to run the same one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttlaunch.planning.launch_plan import LaunchPlan

_OWN_OF_A_HOST = ("HOME", "USER", "PATH", "VIRTUAL_ENV", "PYTHONHOME")
"""What ranks take from the launching shell where they run beside it, and from their host's login elsewhere."""


@dataclass(frozen=True)
class HostPlaces:
    """Where things lie on one host. All paths are absolute.

    Attributes:
        python: The interpreter of its ranks.
        package: The folder that holds the `ttlaunch` package.
        copies: Path on the launching machine to path on the host, for everything that was copied.
        data: Where texts and checkpoints lie, by the SHA-256 of their content.
    """

    python: str
    package: str
    copies: Mapping[str, str]
    data: Mapping[str, str] = field(default_factory=dict)


def plan_on_host(
    plan: LaunchPlan, places: HostPlaces, *, python: str, described: Collection[str] = ()
) -> dict[str, Any]:
    """Return the content of `plan.json` on a host.

    Args:
        plan: The plan, with the launching machine's paths.
        places: The host's.
        python: The interpreter that the plan names.
        described: Variables that the cluster's files set for all ranks; they win over a host's own.
    """
    content = plan.as_json()
    moved = _Moved({**places.copies, python: places.python})
    kept = [name for name in plan.environment if name not in _OWN_OF_A_HOST or name in described]
    environment = moved.environment({name: plan.environment[name] for name in kept})
    environment["PYTHONPATH"] = ":".join(part for part in (places.package, environment.get("PYTHONPATH")) if part)
    content["environment"] = environment
    content["ranks"] = [{**row, "environment": moved.environment(row["environment"])} for row in content["ranks"]]
    content["rank_command"] = [moved.path(word) for word in content["rank_command"]]
    content["working_folder"] = moved.path(content["working_folder"])
    if content["recipe"] is not None:
        content["recipe"] = {**content["recipe"], "folder": moved.path(content["recipe"]["folder"])}
    if content["data"] is not None:
        content["data"] = _lying_there(content["data"], places)
    if content["start"] is not None:
        files = [_lying_there(file, places) for file in content["start"]["files"]]
        content["start"] = {**content["start"], "files": files}
    return content


def _lying_there(file: Mapping[str, Any], places: HostPlaces) -> dict[str, Any]:
    return {**file, "path": places.data[file["sha256"]]}


class _Moved:
    """Moves paths of the launching machine to where their copies lie on a host."""

    def __init__(self, copies: Mapping[str, str]) -> None:
        # Longest first: a folder may have been copied to another place than the folder around it.
        self._copies: Sequence[tuple[str, str]] = sorted(copies.items(), key=lambda pair: len(pair[0]), reverse=True)

    def path(self, value: str) -> str:
        """Move a path that lies inside a folder that was copied, the longest one; anything else stays."""
        for here, there in self._copies:
            if value == here:
                return there
            if value.startswith(f"{here.rstrip('/')}/"):
                return f"{there.rstrip('/')}/{value[len(here.rstrip('/')) + 1 :]}"
        return value

    def paths(self, value: str) -> str:
        """Move paths with colons between them, as in `LD_LIBRARY_PATH`."""
        return ":".join(self.path(part) for part in value.split(":"))

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {name: self.paths(value) for name, value in variables.items()}
