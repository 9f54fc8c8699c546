"""Starts the recipes of `benchmarks/stuck` under ttlaunch, for `benchmarks/hangs.py`."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

STUCK = Path(__file__).parent / "stuck"


def started(
    words: list[str], order: dict[str, object], folder: Path, *, before_mpi: bool = False
) -> subprocess.Popen[str]:
    """`ttlaunch run` in a folder with the recipes and the order."""
    shutil.copytree(STUCK, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for recipe in ("peers", "tiers"):
        shutil.copy(folder / "order.py", folder / recipe)
    (folder / "order.json").write_text(json.dumps(order))
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if before_mpi:
        environment["PYTHONPATH"] = str(folder / "site")
    return subprocess.Popen(
        [sys.executable, "-m", "ttlaunch", "run", "--format", "json", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )


def engine_options(engine: str | None, *, is_recipe: bool = True) -> list[str]:
    """The options of `ttlaunch run` for an engine, and for the transport of its recipes."""
    over_grpc = ["--set", "multihost_config.socket_type=grpc"] if is_recipe and engine == "agents" else []
    return ["--engine", engine, *over_grpc] if engine else []


def ended(process: subprocess.Popen[str], *, within_s: float) -> subprocess.CompletedProcess[str]:
    """The end of a run; status 124 where it does not end."""
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            process.send_signal(number)
            try:
                out, err = process.communicate(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
        return subprocess.CompletedProcess(process.args, 124, out, err)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def failure(stdout: str) -> dict[str, Any]:
    """The first failure in what `--format json` has printed; empty if there is none."""
    try:
        return json.loads(stdout)["failure"] or {}
    except (ValueError, KeyError, TypeError):
        return {}
