"""Find out everything on this machine that decides the bits of a step; see `Fingerprint` of `records/coordinator.py`.

Torch is asked in a process of its own, with the interpreter and the variables of the ranks: it takes seconds to import.
"""

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import ttlaunch
from ttlaunch import contract
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.records.coordinator import Fingerprint, TorchBuild
from ttlaunch.records.parser import BadRecord, read

_DEADLINE_S = 180.0
_DATA_PATH = ("training_config", "data_path")
_NOT_OF_TTLAUNCH = ("_recipes", "_configurations")  # where a wheel has them
_ASK_TORCH = """\
import json, sys, torch
threads, device = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(threads)
has_cuda = device != "cpu" and torch.cuda.is_available()
print(json.dumps({
    "torch": f"{torch.__version__} {torch.version.git_version or ''}".strip(),
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    "threads": torch.get_num_threads(),
    "device": torch.cuda.get_device_name(0) if has_cuda else "cpu",
}))
"""


class MeasureError(TtlaunchError):
    """This machine cannot say what decides its bits; the text says why, in one clause."""


def measure_fingerprint(plan: LaunchPlan) -> Fingerprint:
    """Return the fingerprint of this machine for a plan whose ranks run a recipe here.

    Raises:
        MeasureError: The interpreter of the ranks has no torch that can be imported.

    Cost: a few seconds, because torch is imported.
    """
    program = plan.program
    assert isinstance(program, RecipeProgram)  # noqa: S101 - only recipes have workers that come and go
    config = program.config["device_config"]
    environment = {**os.environ, **contract.fill_references(plan.environment, {**os.environ, **plan.secrets})}
    found = _ask_torch(
        plan.rank_command[0], int(config["threads_per_rank"]), str(config["device"]), environment=environment
    )
    return Fingerprint(
        release=hash_code(Path(ttlaunch.__file__).parent, without=_NOT_OF_TTLAUNCH),
        recipe=hash_code(Path(program.folder)),
        config=hash_config(program.config),
        corpus=str((program.data or {}).get("sha256") or ""),
        **vars(found),
    )


def hash_config(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a resolved configuration, whatever the path of the text is: its content counts."""
    section, key = _DATA_PATH
    kept = {
        name: {own: value for own, value in values.items() if (name, own) != (section, key)}
        if isinstance(values, Mapping)
        else values
        for name, values in config.items()
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def hash_code(folder: Path, *, without: Collection[str] = ()) -> str:
    """Return the SHA-256 over names and contents of the Python files in a folder; `without` are folders in it that do not count."""
    total = hashlib.sha256()
    for name, path in sorted(_python_files(folder, without)):
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _python_files(folder: Path, without: Collection[str]) -> Iterator[tuple[str, Path]]:
    for inside, folders, files in os.walk(folder):
        is_top = Path(inside) == folder
        # Neither byte code nor what no import finds, such as `.venv`.
        folders[:] = [name for name in folders if name.isidentifier() and name != "__pycache__"]
        folders[:] = [name for name in folders if not (is_top and name in without)]
        for name in files:
            if name.endswith(".py"):
                path = Path(inside, name)
                yield path.relative_to(folder).as_posix(), path


def _ask_torch(python: str, threads: int, device: str, *, environment: Mapping[str, str]) -> TorchBuild:
    try:
        with tempfile.TemporaryDirectory() as empty:  # `-c` would import what lies in the current folder
            answer = subprocess.run(
                [python, "-c", _ASK_TORCH, str(threads), device],
                cwd=empty,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_DEADLINE_S,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise MeasureError(f"torch was not imported within {_DEADLINE_S:.0f} s") from error
    except OSError as error:
        raise MeasureError(f"{shown(python)} cannot be started: {(error.strerror or str(error)).lower()}") from error
    found = read(TorchBuild, answer.stdout.strip().rpartition(b"\n")[2])
    if answer.returncode or isinstance(found, BadRecord):
        last = answer.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise MeasureError(f"torch cannot be asked: {shown(last or f'status {answer.returncode}', longest=200)}")
    return found
