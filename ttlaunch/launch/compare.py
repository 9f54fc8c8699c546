"""What differs between two runs: plan, configuration, code, environment, and from which step on their losses."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.launch.json_files import read_object_if_any
from ttlaunch.launch.recorded import read_rows

SECTIONS = ("plan", "configuration", "code", "environment", "results")
_LINE = re.compile(r"(?P<indent> *)(?P<key>[^\s:#][^:]*):(?: (?P<value>.*?))?(?:  # (?P<origin>.*))?\Z")
_INDENT = 2
_PLAN = ("topology", "recipe", "command", "layout", "world_size")
_RESULTS = ("status", "exit_status", "steps", "first_validation", "last_validation", "parameters_sha256")
_LOSSES = {contract.KIND_STEP: "training loss", contract.KIND_VALIDATION: "validation loss"}


@dataclass(frozen=True)
class Difference:
    """One thing that two runs do not have in common; None where a run does not have it.

    Attributes:
        left_origin, right_origin: Where a value of the configuration came from.
    """

    section: str
    name: str
    left: str | None
    right: str | None
    left_origin: str | None = None
    right_origin: str | None = None


@dataclass(frozen=True)
class LossComparison:
    """Losses of one kind, over the steps that both runs have reported.

    Attributes:
        first_step: The first at which they differ; None if they are equal to the last bit.
        left, right: The losses at that step.
    """

    kind: str
    common_steps: int
    first_step: int | None
    left: float | None
    right: float | None


def compare_runs(left: Path, right: Path) -> tuple[list[Difference], list[LossComparison]]:
    """Everything that differs, by section; and where losses part.

    Raises:
        OSError: A plan cannot be read.
        ValueError: It is none.
    """
    rows = read_rows(left), read_rows(right)
    plans = read_object_if_any(left / contract.PLAN_FILE), read_object_if_any(right / contract.PLAN_FILE)
    differences = _differ("plan", *({name: plan.get(name) for name in _PLAN} for plan in plans))
    differences += _differ("plan", *({f"rank {row.rank}": f"{row.role} on {row.host}" for row in run} for run in rows))
    differences += _configuration(left, right)
    differences += _differ("code", _code(left), _code(right))
    differences += _differ("environment", _environment(left, plans[0]), _environment(right, plans[1]))
    reports = read_object_if_any(left / contract.REPORT_FILE), read_object_if_any(right / contract.REPORT_FILE)
    differences += _differ("results", *({name: report.get(name) for name in _RESULTS} for report in reports))
    losses = [_losses(left, len(rows[0])), _losses(right, len(rows[1]))]
    return differences, [_compare_losses(name, losses[0][kind], losses[1][kind]) for kind, name in _LOSSES.items()]


def read_configuration(text: str) -> dict[str, tuple[str, str | None]]:
    """Every key of a resolved training file with its value, as text, and where it came from."""
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


def _configuration(left: Path, right: Path) -> list[Difference]:
    a, b = (read_configuration(_text(run / contract.TRAIN_FILE)) for run in (left, right))
    none: tuple[None, None] = (None, None)
    return [
        Difference(
            "configuration",
            name,
            a.get(name, none)[0],
            b.get(name, none)[0],
            a.get(name, none)[1],
            b.get(name, none)[1],
        )
        for name in dict.fromkeys([*a, *b])
        if a.get(name, none)[0] != b.get(name, none)[0]
    ]


def _code(run: Path) -> dict[str, Any]:
    code = read_object_if_any(run / contract.CODE_FILE)
    recipe = code.get("recipe")
    tree = recipe.get("tree") if isinstance(recipe, dict) else None
    changes = {None: None, "": "none"}.get(code.get("diff"), "some")
    return {
        "recipe's tree": tree,
        "commit": code.get("commit"),
        "uncommitted changes": changes,
        "release": code.get("release"),
    }


def _environment(run: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    known = read_object_if_any(run / contract.ENVIRONMENT_FILE)
    versions, variables = known.get("versions"), plan.get("environment")
    return {
        "python": known.get("python"),
        "platform": known.get("platform"),
        **(versions if isinstance(versions, dict) else {}),
        **(variables if isinstance(variables, dict) else {}),
    }


def _differ(section: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    names = dict.fromkeys([*left, *right])
    return [
        Difference(section, name, _plain(left.get(name)), _plain(right.get(name)))
        for name in names
        if left.get(name) != right.get(name)
    ]


def _losses(run: Path, ranks: int) -> dict[str, dict[int, float]]:
    """By kind and step, the loss that the lowest rank which knows one has reported."""
    found: dict[str, dict[int, float]] = {kind: {} for kind in _LOSSES}
    for rank in range(ranks):
        for line in _text(run / contract.progress_file(rank)).splitlines():
            record = contract.read_record(line) or {}
            kind, step, loss = record.get("kind"), record.get("step"), record.get("loss")
            if kind in found and isinstance(step, int) and isinstance(loss, float):
                found[kind].setdefault(step, loss)
    return found


def _compare_losses(kind: str, left: Mapping[int, float], right: Mapping[int, float]) -> LossComparison:
    common = sorted(left.keys() & right.keys())
    for step in common:
        if left[step] != right[step] and not (math.isnan(left[step]) and math.isnan(right[step])):
            return LossComparison(kind, len(common), step, left[step], right[step])
    return LossComparison(kind, len(common), None, None, None)


def _plain(value: Any) -> str | None:
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    return None if value is None else str(value)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
