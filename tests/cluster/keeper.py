"""Keeps one machine of a test cluster alive, enters it, and clears away what crashed tests left of theirs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INSIDE = Path(__file__).with_name("inside.py")
PLACE = Path("/var/tmp")
PREFIX = "ttlaunch-cluster-"
"""The folder of a cluster lies in `PLACE` and is called this, then the id and start time of its owner."""

_KEEPERS = "keepers"
_DEADLINE_S = 20


def wait_until(condition, *, what, timeout_s=_DEADLINE_S):
    """Return the first true value of `condition()`; looks often, and says what it waited for when time is up."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.005)
    return value


def start_time(pid):
    """When the process started, in ticks since boot: with the id, a name that is never given twice. None: no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Keeper:
    """The process that holds one machine's namespaces."""

    def __init__(self, spec, *, state):
        self.name = spec["name"]
        self._log = state / "logs" / spec["name"]
        self._own_pids = spec["kind"] == "host"
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(INSIDE), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # an interrupt typed at the tests is theirs to handle
            )
        self._inside = None
        _note_keeper(state, self._process.pid)

    def wait_until_ready(self):
        answer = self._process.stdout.readline().split()
        if answer[:1] != ["ready"]:
            raise RuntimeError(f"a test machine did not start: {self._log.read_text(encoding='utf-8').strip()}")
        self._inside = int(answer[1])

    @property
    def alive(self):
        return self._process.poll() is None

    @property
    def pid(self):
        """A process inside, as this machine numbers it. Once it has ended, the number may be anybody's."""
        if not self.alive:
            raise RuntimeError(f"{self.name} has no power")
        return self._inside

    def argv(self, *command, cwd="/"):
        """The words that run a command inside this machine."""
        own = ["--ipc", "--pid"] if self._own_pids else []
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--net", *own]
        return [*enter, "--", "env", f"--chdir={cwd}", *map(str, command)]

    def root(self):
        """Where this machine's file system can be seen from here, while it is alive."""
        return Path(f"/proc/{self.pid}/root")

    def pids(self):
        """Who runs inside, with command lines; not the keeper's own process."""
        if not self.alive:
            return {}
        kind = "pid" if self._own_pids else "net"
        own = Path(f"/proc/{self.pid}/ns/{kind}").readlink()
        found = {}
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            try:
                if pid != self.pid and Path(f"/proc/{pid}/ns/{kind}").readlink() == own:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ").strip()
            except OSError:  # it has ended
                continue
        return found

    def cut_power(self):
        """Kill process 1 of the machine, and with it, all others."""
        os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self):
        """Let go of the machine and wait until nothing of it runs."""
        self._process.stdin.close()
        try:
            self._process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def new_state_folder():
    """A folder for the files of one cluster, after what dead owners left was removed."""
    for folder in PLACE.glob(f"{PREFIX}*"):
        _remove_if_abandoned(folder)
    state = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-", dir=PLACE))
    state.chmod(0o755)
    for name in ("logs", "etc", "disks", "shared"):
        (state / name).mkdir()
    return state


def _note_keeper(state, pid):
    with (state / _KEEPERS).open("a", encoding="utf-8") as file:
        file.write(f"{pid} {start_time(pid)}\n")


def _remove_if_abandoned(folder):
    owner, started = folder.name.removeprefix(PREFIX).split("-")[:2]
    if start_time(owner) == started:
        return
    notes = folder / _KEEPERS
    for line in notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else ():
        pid, started = line.split()
        if start_time(pid) == started:  # it should have ended with its owner
            os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
