"""The plan as one host reads it: the same decisions, with that host's own paths in place of the launching machine's.

Users can have other names and homes on other hosts, and the code is in a release folder there. Every path in the plan that
points into a copied folder is therefore replaced by the path of the copy; nothing else in a value changes. The hash is still
that of the plan itself, which shows that all hosts run the same plan.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttlaunch.planning.launch_plan import LaunchPlan

_HOST_SPECIFIC = ("HOME", "USER", "PATH", "VIRTUAL_ENV", "PYTHONHOME")
"""Variables that ranks on the launching machine take from the shell, and ranks on other hosts from their host's login."""


@dataclass(frozen=True)
class HostPlaces:
    """The paths on one host. All of them are absolute.

    Attributes:
        python: The interpreter of its ranks.
        package: The folder of the `ttlaunch` package.
        copies: For each copied path on the launching machine, the path on the host.
        data: The paths of texts and checkpoints, by the SHA-256 of their content.
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
        places: The paths on the host.
        python: The interpreter that the plan names.
        described: Variables that the cluster's files set for all ranks; they take precedence over the host's own.
    """
    content = plan.as_json()
    copied = _CopiedPaths({**places.copies, python: places.python})
    kept = [name for name in plan.environment if name not in _HOST_SPECIFIC or name in described]
    environment = copied.environment({name: plan.environment[name] for name in kept})
    environment["PYTHONPATH"] = ":".join(part for part in (places.package, environment.get("PYTHONPATH")) if part)
    content["environment"] = environment
    content["ranks"] = [{**row, "environment": copied.environment(row["environment"])} for row in content["ranks"]]
    content["rank_command"] = [copied.path(word) for word in content["rank_command"]]
    content["working_folder"] = copied.path(content["working_folder"])
    if content["recipe"] is not None:
        content["recipe"] = {**content["recipe"], "folder": copied.path(content["recipe"]["folder"])}
    if content["data"] is not None:
        content["data"] = _with_path_there(content["data"], places)
    if content["start"] is not None:
        files = [_with_path_there(file, places) for file in content["start"]["files"]]
        content["start"] = {**content["start"], "files": files}
    return content


def _with_path_there(file: Mapping[str, Any], places: HostPlaces) -> dict[str, Any]:
    """Return a file's entry in the plan with its path on the host."""
    return {**file, "path": places.data[file["sha256"]]}


class _CopiedPaths:
    """Replaces paths of the launching machine by the paths of their copies on a host."""

    def __init__(self, copies: Mapping[str, str]) -> None:
        # Longest first: a folder may have been copied to another place than the folder around it.
        self._copies: Sequence[tuple[str, str]] = sorted(copies.items(), key=lambda pair: len(pair[0]), reverse=True)

    def path(self, value: str) -> str:
        """Replace a path inside a copied folder, for nested folders the innermost one; return any other text unchanged."""
        for here, there in self._copies:
            if value == here:
                return there
            if value.startswith(f"{here.rstrip('/')}/"):
                return f"{there.rstrip('/')}/{value[len(here.rstrip('/')) + 1 :]}"
        return value

    def paths(self, value: str) -> str:
        """Replace each of several paths separated by colons, as in `LD_LIBRARY_PATH`."""
        return ":".join(self.path(part) for part in value.split(":"))

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {name: self.paths(value) for name, value in variables.items()}
