"""Read the stacks of processes that cannot write them themselves: those that are stopped or stuck below Python.

This needs py-spy and the right to read other processes (as root, or where the kernel lets a user read their own). Without
either, nothing is written. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

from ttlaunch import contract
from ttlaunch.agent.run_processes import belongs_to, is_stopped

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_LONGEST_S = 3.0


def find_py_spy(*pythons: str) -> str | None:
    """Find py-spy beside one of these interpreters, beside our own, or in PATH."""
    folders = [os.path.dirname(python) for python in (*pythons, sys.executable) if python]
    return shutil.which("py-spy", path=os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)]))


def dump_stacks(pids: Mapping[int, int], *, run_id: str, run_folder: str, py_spy: str) -> list[int]:
    """Append the stacks of each rank's process to the rank's file of stacks.

    Args:
        pids: The processes by rank; those that no longer belong to the run are left out.
        run_id: The run's id.
        run_folder: The run's folder, which has the files of stacks.
        py_spy: The path of py-spy.

    Returns:
        The ranks whose stacks were read.
    """
    running = {rank: _start(pid, py_spy) for rank, pid in pids.items() if belongs_to(pid, run_id)}
    deadline = time.monotonic() + _LONGEST_S
    texts = {rank: _finish(process, deadline) for rank, process in running.items()}
    for rank, text in texts.items():
        path = os.path.join(run_folder, contract.stacks_file(rank))
        contract.make_private_folder(os.path.dirname(path))
        with open(path, "a", encoding="utf-8", opener=contract.open_private) as file:
            file.write(text)
    return [rank for rank, text in texts.items() if text]


def _start(pid: int, py_spy: str) -> subprocess.Popen[bytes]:
    """Start py-spy on a process; without pausing it if it is stopped already, since py-spy would wait for that for ever."""
    words = [py_spy, "dump", "--json", "--pid", str(pid), *(["--nonblocking"] if is_stopped(pid) else [])]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes], deadline: float) -> str:
    try:
        output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        return render_threads(json.loads(output))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return ""
    except (ValueError, KeyError, TypeError):
        return ""


def render_threads(threads: list[dict[str, Any]]) -> str:
    """Render py-spy's answer about a process in the format of faulthandler, with the main thread last."""
    ordered = sorted(threads, key=lambda thread: thread["os_thread_id"] == thread["pid"])
    return "".join(_rendered(thread) for thread in ordered)


def _rendered(thread: dict[str, Any]) -> str:
    lines = [f"Thread 0x{int(thread['thread_id']):016x} (most recent call first):"]
    lines += [f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}' for frame in thread["frames"]]
    return "\n".join(lines) + "\n"
