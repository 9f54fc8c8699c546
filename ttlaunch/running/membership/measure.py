"""Find out everything on a machine that decides the bits of a step; see `Fingerprint` of `records/coordinator.py`.

Torch is asked in a process of its own, with the interpreter and the variables of the ranks: it takes seconds to import.
"""

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ttlaunch
from ttlaunch import contract
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.records.coordinator import Fingerprint, TorchBuild
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.system_reason import system_reason

MEASURE_S = 180.0
"""How long the ranks' interpreter may take to import torch."""
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


AskPython = Callable[[Sequence[str]], subprocess.CompletedProcess[bytes]]
"""Runs the interpreter of the ranks with these arguments, where they run and with their variables, or raises `MeasureError`."""


class MeasureError(TtlaunchError):
    """A machine cannot say what decides its bits; the text says why, in one clause."""


def measure_fingerprint(plan: LaunchPlan, ask: AskPython | None = None) -> Fingerprint:
    """Return the fingerprint of the machine on which the ranks of a plan run its recipe.

    Args:
        plan: The plan; its recipe and the code of ttlaunch are this machine's, also where ranks run copies of them on hosts.
        ask: Asks the interpreter of the ranks; None if they run on this machine.

    Raises:
        MeasureError: The interpreter of the ranks has no torch that can be imported.

    Cost: a few seconds, because torch is imported.
    """
    program = plan.program
    assert isinstance(program, RecipeProgram)  # noqa: S101 - only recipes have workers that come and go
    config = program.config["device_config"]
    answer = (ask or ask_here(plan))(["-c", _ASK_TORCH, str(int(config["threads_per_rank"])), str(config["device"])])
    found = _parsed(answer)
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


def ask_here(plan: LaunchPlan) -> AskPython:
    """Return a function that runs the interpreter of a plan's ranks on this machine."""
    environment = {**os.environ, **contract.fill_references(plan.environment, {**os.environ, **plan.secrets})}
    python = plan.rank_command[0]

    def ask(arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        try:
            with tempfile.TemporaryDirectory() as empty:  # `-c` would import what lies in the current folder
                return subprocess.run(
                    [python, *arguments],
                    cwd=empty,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=MEASURE_S,
                    check=False,
                )
        except subprocess.TimeoutExpired as error:
            raise MeasureError(f"torch was not imported within {MEASURE_S:.0f} s") from error
        except OSError as error:
            raise MeasureError(f"{shown(python)} cannot be started: {system_reason(error)}") from error

    return ask


def _parsed(answer: subprocess.CompletedProcess[bytes]) -> TorchBuild:
    found = read(TorchBuild, answer.stdout.strip().rpartition(b"\n")[2])
    if answer.returncode or isinstance(found, BadRecord):
        last = answer.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise MeasureError(f"torch cannot be asked: {shown(last or f'status {answer.returncode}', longest=200)}")
    return found
