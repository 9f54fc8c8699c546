"""Compare two runs: program, start, placement, configuration, code, environment, results, and losses step by step.

Every section also has the number of compared values: without differences, it shows whether there was anything to compare.
"""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ttlaunch import contract
from ttlaunch.records.ranks import StepDone, Validation, kind_of
from ttlaunch.running.bad_records import progress_of
from ttlaunch.running.runs.facts import read_ranks
from ttlaunch.running.runs.files import read_object_if_any, read_text_if_any

SECTIONS = ("program", "placement", "configuration", "code", "environment", "results")
_LINE = re.compile(r"(?P<indent> *)(?P<key>[^\s:#][^:]*):(?: (?P<value>.*?))?(?:  # (?P<origin>.*))?\Z")
_INDENT = 2
_PLACEMENT = ("topology", "layout", "world_size")
_RESULTS = ("status", "exit_status", "steps", "first_validation", "last_validation", "parameters_sha256")
_LOSSES = {contract.KIND_STEP: "training loss", contract.KIND_VALIDATION: "validation loss"}


@dataclass(frozen=True)
class Difference:
    """A value that differs between two runs.

    Attributes:
        left, right: The value in each run; None if the run does not have it.
        left_origin, right_origin: The origin of a value of the configuration, such as a file or an option.
    """

    section: str
    name: str
    left: str | None
    right: str | None
    left_origin: str | None = None
    right_origin: str | None = None


@dataclass(frozen=True)
class LossComparison:
    """The comparison of losses of one kind, over the steps that both runs have reported.

    Attributes:
        first_step: The first step at which the losses differ; None if all are equal to the last bit.
        left, right: The losses at that step.
    """

    kind: str
    common_steps: int
    first_step: int | None
    left: float | None
    right: float | None


@dataclass(frozen=True)
class RunDifferences:
    """All differences of two runs.

    Attributes:
        compared: For each section, the number of values that one of the runs has or both have.
    """

    compared: Mapping[str, int]
    differences: list[Difference]
    losses: list[LossComparison]

    @property
    def same(self) -> bool:
        return not self.differences and all(loss.first_step is None for loss in self.losses)


def find_differences(left: Path, right: Path) -> RunDifferences:
    """Compare everything that is known of two runs, by section, and find the first step at which losses differ.

    Raises:
        OSError: A plan cannot be read.
        ValueError: The file is not a plan.
    """
    rows = read_ranks(left), read_ranks(right)
    plans = read_object_if_any(left / contract.PLAN_FILE), read_object_if_any(right / contract.PLAN_FILE)
    sides = [_facts(run, plan) for run, plan in zip((left, right), plans, strict=True)]
    compared, differences = {}, []
    for section in SECTIONS:
        a, b = ({name: value for name, value in side[section].items() if value.text is not None} for side in sides)
        compared[section] = len(a.keys() | b.keys())
        differences += _differ(section, a, b)
    losses = [_losses(left, len(rows[0])), _losses(right, len(rows[1]))]
    parting = [_compare_losses(name, losses[0][kind], losses[1][kind]) for kind, name in _LOSSES.items()]
    return RunDifferences(compared, differences, parting)


def read_configuration(text: str) -> dict[str, tuple[str, str | None]]:
    """Read every key of a resolved training file with its value, as text, and the origin of the value."""
    found: dict[str, tuple[str, str | None]] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"]) // _INDENT
        path[depth:] = [match["key"]]
        if match["value"]:
            found[".".join(path)] = match["value"], match["origin"]
    return found


class _Value(NamedTuple):
    """A value as text, None if the run does not have it, and its origin."""

    text: str | None
    origin: str | None = None


_Facts = dict[str, _Value]


def _facts(run: Path, plan: Mapping[str, Any]) -> dict[str, _Facts]:
    """Read all values of a run's folder, by section."""
    report = read_object_if_any(run / contract.REPORT_FILE)
    settings = read_configuration(read_text_if_any(run / contract.TRAIN_FILE))
    return {
        "program": _program(plan),
        "placement": _placement(plan),
        "configuration": {name: _Value(*value) for name, value in settings.items()},
        "code": _code(run),
        "environment": _environment(run, plan),
        "results": {name: _plain(report.get(name)) for name in _RESULTS},
    }


def _program(plan: Mapping[str, Any]) -> _Facts:
    """Return the values about the program, its training text, and the checkpoint from which it began."""
    recipe, command, data, start = (_object(plan.get(name)) for name in ("recipe", "command", "data", "start"))
    argv = command.get("command")
    return {
        "recipe": _plain(recipe.get("name")),
        "command": _plain(shlex.join(map(str, argv)) if isinstance(argv, list) else command.get("name")),
        "training text": _plain(data.get("sha256")),
        "began from": _plain(start.get("origin")),
        "began after step": _plain(start.get("step")),
    }


def _placement(plan: Mapping[str, Any]) -> _Facts:
    found = {name.replace("_", " "): _plain(plan.get(name)) for name in _PLACEMENT}
    for row in plan["ranks"]:
        mesh = f", mesh {row['mesh_id']}" if row.get("mesh_id") is not None else ""
        found[f"rank {row['rank']}"] = _plain(f"{row['role']} on {row['host']}{mesh}")
    return found


def _code(run: Path) -> _Facts:
    code = read_object_if_any(run / contract.CODE_FILE)
    changes = {None: None, "": "none"}.get(code.get("diff"), "some")
    return {
        "recipe's tree": _plain(_object(code.get("recipe")).get("tree")),
        "commit": _plain(code.get("commit")),
        "uncommitted changes": _plain(changes),
        "release": _plain(code.get("release")),
    }


def _environment(run: Path, plan: Mapping[str, Any]) -> _Facts:
    """Return the versions of packages, the MPI, and the environment variables of ranks."""
    known = read_object_if_any(run / contract.ENVIRONMENT_FILE)
    found = {"python": known.get("python"), "platform": known.get("platform")}
    found |= _object(known.get("versions"))
    found["MPI"] = _object(plan.get("engine")).get("name")
    found |= _object(plan.get("environment"))
    for row in plan["ranks"]:
        found |= {f"{name} of rank {row['rank']}": value for name, value in _object(row.get("environment")).items()}
    return {name: _plain(value) for name, value in found.items()}


def _differ(section: str, left: _Facts, right: _Facts) -> list[Difference]:
    none = _Value(None)
    pairs = ((name, left.get(name, none), right.get(name, none)) for name in dict.fromkeys([*left, *right]))
    return [Difference(section, name, a.text, b.text, a.origin, b.origin) for name, a, b in pairs if a.text != b.text]


def _losses(run: Path, ranks: int) -> dict[str, dict[int, float]]:
    """Return the losses by kind and step, each from the lowest rank that has reported one."""
    found: dict[str, dict[int, float]] = {kind: {} for kind in _LOSSES}
    for rank in range(ranks):
        for record in progress_of(run, rank):
            if isinstance(record, StepDone | Validation) and isinstance(record.loss, float):
                found[kind_of(record)].setdefault(record.step, record.loss)
    return found


def _compare_losses(kind: str, left: Mapping[int, float], right: Mapping[int, float]) -> LossComparison:
    common = sorted(left.keys() & right.keys())
    for step in common:
        if left[step] != right[step] and not (math.isnan(left[step]) and math.isnan(right[step])):
            return LossComparison(kind, len(common), step, left[step], right[step])
    return LossComparison(kind, len(common), None, None, None)


def _plain(value: Any) -> _Value:
    return _Value(None if value is None else str(value))


def _object(value: Any) -> dict[str, Any]:
    """Return a value of JSON if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}
