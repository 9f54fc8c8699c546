"""Where `benchmarks/chaos.py` breaks runs: starts one here or over hosts, finds whom to break, and looks what is left.

The processes of test hosts can be seen from here under other numbers, so one look at every environment of this machine
finds what carries a run's id on any of them, also on one that is cut off.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Cluster
from ttlaunch import contract
from ttlaunch.agent.run_processes import is_gone, kill_run_processes, processes_of_runs

HOLDOUT = Path(__file__).parent / "broken/holdout.py"
RANKS = 3
VICTIM = 1
GRACE_S = 2.0
_UP_S = 60.0
_PRESSED_AGAIN_S = 0.5
_FLAPS, _FLAP_S = 2, 1.5
_LOOK_S = 0.05


@dataclass
class Run:
    """A run that is up.

    Attributes:
        view: The process that was started as `ttlaunch run`.
        folder: The run's.
        scratch: Its folder in shared memory.
        cluster: Its hosts; None: this machine.
    """

    view: "subprocess.Popen[bytes]"
    folder: Path
    scratch: str
    cluster: Cluster | None

    @property
    def run_id(self) -> str:
        return self.folder.name

    def supervisor(self) -> int:
        return int(json.loads((self.folder / contract.LAUNCHER_FILE).read_text())["pid"])

    def mpirun(self) -> int:
        """The engine's process, or that on the victim's host which starts ranks there."""
        lines = (self.folder / contract.EVENTS_FILE).read_text().splitlines()
        start = next(event for event in map(json.loads, lines) if event["event"] == "start")
        if contract.ENGINE_PROCESS in start:
            return int(start[contract.ENGINE_PROCESS])
        assert self.cluster is not None
        there = self.cluster.pids(self.victim_host)
        return next(pid for pid in there if Path(f"/proc/{pid}/comm").read_text() == "start_ranks\n")

    def shim(self) -> int:
        line = (self.folder / contract.progress_file(VICTIM)).read_text().splitlines()[0]
        pid = int(json.loads(line)["shim_pid"])
        return pid if self.cluster is None else seen_from_here(pid, self.cluster.pids(self.victim_host))

    def agent(self) -> int:
        """The agent of the run on the victim's host: the one that holds the claim on its folder."""
        assert self.cluster is not None
        for pid in self.cluster.pids(self.victim_host):
            if any(link.endswith("/agent.claim") for link in _open_files(pid)):
                return pid
        raise LookupError(f"no agent serves the run on {self.victim_host}")

    @property
    def victim_host(self) -> str:
        return str(json.loads((self.folder / contract.PLAN_FILE).read_text())["ranks"][VICTIM]["host"])

    def outcome(self) -> str | None:
        """What its report says; None if nobody wrote one."""
        try:
            return str(json.loads((self.folder / contract.REPORT_FILE).read_text())["status"])
        except (OSError, ValueError):
            return None

    def left(self) -> list[str]:
        """What there still is of it anywhere."""
        found = [f"process {pid} {_words(pid)}" for pid, run_id in processes_of_runs() if run_id == self.run_id]
        found = [words for words in found if not is_gone(int(words.split()[1]))]
        if os.path.lexists(self.scratch):
            found.append(f"here {self.scratch}")
        for host in self.cluster.hosts if self.cluster else ():
            found += [f"{host} {path}" for path in self._folders_on(host)]
        return found

    def _folders_on(self, host: str) -> Iterator[str]:
        assert self.cluster is not None
        try:
            root = self.cluster.path(host, "/dev").parent
        except ValueError:  # it is off, and its memory with it
            return
        for pattern in (self.scratch.lstrip("/"), "tmp/prte.*", "tmp/ompi.*", "dev/shm/sm_segment.*"):
            yield from (f"/{path.relative_to(root)}" for path in root.glob(pattern))

    def remove(self) -> None:
        """Leave nothing to the next run, whatever was found."""
        if self.view.poll() is None:
            self.view.kill()
        self.view.wait()
        kill_run_processes(self.run_id)
        shutil.rmtree(self.scratch, ignore_errors=True)


def start_run(
    folder: Path, kind: str, *, options: Sequence[str], seconds: float, cluster: Cluster | None, lease_s: float
) -> Run:
    """Start a run with further options in an empty folder and return when all its ranks are up."""
    shutil.copy(HOLDOUT, folder / "holdout.py")
    words = ["run", *options, "holdout.py", "--ranks", str(RANKS), "--grace", str(GRACE_S)]
    if cluster is not None:
        lab = folder / "configurations/lab"
        lab.mkdir(parents=True)
        (lab / "hosts.txt").write_text(cluster.hostfile(), encoding="utf-8")
        words += ["--on", "lab", "--lease", str(lease_s)]
    command = [sys.executable, "-m", "ttlaunch", *words, "--", kind, str(seconds)]
    with (folder / "out").open("wb") as out:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "start_new_session": True}
        if cluster is None:
            view = subprocess.Popen(command, cwd=folder, **options)
        else:
            view = cluster.popen("launcher", command, cwd=folder, **options)
    end = time.monotonic() + _UP_S
    while not (scratch := _is_up(folder)):
        if view.poll() is not None or time.monotonic() > end:
            view.kill()
            raise RuntimeError(f"a run did not begin: {(folder / 'out').read_text(errors='replace')[-500:]}")
        time.sleep(_LOOK_S)
    return Run(view, next(path for path in folder.glob("runs/[!.]*") if path.is_dir()), scratch, cluster)


def break_run(run: Run, fault: str) -> None:
    """Make a fault, by its name in `chaos.py`."""
    victims = {
        "the view": lambda: run.view.pid,
        "the supervisor": run.supervisor,
        "mpirun": run.mpirun,
        "a shim": run.shim,
        "an agent": run.agent,
    }
    match fault:
        case "Ctrl-C" | "Ctrl-C twice":
            run.view.send_signal(signal.SIGINT)
            if fault.endswith("twice"):
                time.sleep(_PRESSED_AGAIN_S)
                run.view.send_signal(signal.SIGINT)
        case "SIGTERM":
            run.view.send_signal(signal.SIGTERM)
        case "closed terminal":
            run.view.send_signal(signal.SIGHUP)
        case "Ctrl-Z":
            run.view.send_signal(signal.SIGSTOP)
        case "flapping link":
            for _ in range(_FLAPS):
                run.cluster.link(run.victim_host, up=False)
                time.sleep(_FLAP_S)
                run.cluster.link(run.victim_host, up=True)
                time.sleep(_FLAP_S)
        case "power cut of a host":
            run.cluster.kill(run.victim_host)
        case "cut-off host":
            run.cluster.link(run.victim_host, up=False)
        case _:
            os.kill(victims[fault.removeprefix("SIGKILL of ")](), signal.SIGKILL)


def mend(run: Run, fault: str) -> None:
    """Make the cluster whole again, and let a view go on that was stopped."""
    run.view.send_signal(signal.SIGCONT)
    if fault == "power cut of a host":
        run.cluster.revive(run.victim_host)
    elif fault == "cut-off host":
        run.cluster.link(run.victim_host, up=True)


def _is_up(folder: Path) -> str | None:
    """The run's scratch folder once every rank has said that it is up."""
    logs = [path.read_bytes() for path in folder.glob("runs/*/logs/rank-*.stdout")]
    if len(logs) < RANKS or not all(b"up" in log for log in logs):
        return None
    run_id = next(path.name for path in folder.glob("runs/[!.]*") if path.is_dir())
    for pid in [pid for pid, found in processes_of_runs() if found == run_id]:
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        name = f"{contract.ENV_SCRATCH}=".encode()
        found = next((entry[len(name) :].decode() for entry in entries if entry.startswith(name)), None)
        if found:
            return found
    return None


def seen_from_here(pid: int, candidates: dict[int, str]) -> int:
    """The number that a host's process has on this machine."""
    for candidate in candidates:
        try:
            status = Path(f"/proc/{candidate}/status").read_text()
        except OSError:
            continue
        numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
        if int(numbers[-1]) == pid:
            return candidate
    raise LookupError(f"no process of the host has the number {pid}")


def _open_files(pid: int) -> list[str]:
    try:
        return [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:80]
    except OSError:
        return ""
