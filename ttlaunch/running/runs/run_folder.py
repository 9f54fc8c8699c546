"""Make and fill the folder of one run on the launching machine: plan, inputs, history and results.

`plan.json` and the engine's files are exactly what `ttlaunch plan --out` writes; the rest is the run's own.
"""

import contextlib
import json
import math
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.agent.claims import claim, remove_abandoned, remove_scratch
from ttlaunch.errors import RunFolderError
from ttlaunch.planning.launch_plan import LaunchPlan, render_plan_json
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import load
from ttlaunch.running.runs.files import Tail, open_unlinked
from ttlaunch.running.runs.launcher import write_launcher
from ttlaunch.system_reason import system_reason

_SCRATCH = "ttl-"
_STAMP = len("2026-08-23T10-14-07")
_COMMAND_FILE = "command.sh"
_MOST_EVENT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class RunFolder:
    """A run's id and the path of its folder."""

    run_id: str
    path: Path

    def file(self, name: str) -> Path:
        return self.path / name

    def records(self) -> Collection[str] | None:
        """Return the files in the folder of records, each by its name in the run's folder; None if it cannot be listed.

        Cost: less than to look for three of them.
        """
        try:
            names = os.listdir(self.path / contract.RECORDS_DIR)  # noqa: PTH208 - a path for each takes longer
        except OSError:
            return None
        return {f"{contract.RECORDS_DIR}/{name}" for name in names}


def ranks_named(records: Iterable[str] | None) -> Container[int]:
    """Return the ranks to which files of records belong, from what `RunFolder.records` has returned; for None, all that there can be."""
    if records is None:
        return range(sys.maxsize)
    numbers = (name.partition(".")[0].removeprefix(f"{contract.RECORDS_DIR}/rank-") for name in records)
    return {int(number) for number in numbers if number.isdecimal() and number.isascii()}


def start_time(run_id: str) -> float | None:
    """Return the start time that a run's id contains, in seconds since the epoch; None if it contains none."""
    day, _, time = run_id[:_STAMP].partition("T")
    try:
        # `strptime` would import a calendar and a parser of formats first.
        return datetime.fromisoformat(f"{day}T{time.replace('-', ':')}").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def supervisor_file(stream: str) -> str:
    """Return the path of the file with one of the supervisor's output streams, relative to the run folder."""
    return f"{contract.LOGS_DIR}/supervisor.{stream}"


def create_run_folder(runs_folder: Path, *, now: datetime | None = None, group: int | None = None) -> RunFolder:
    """Make `runs/<id>/` with a name that sorts by time and that no concurrent run can take.

    Only the user can read it. With a `group`, its members can read it too: the folder is the group's and has the set-group-ID
    bit, by which whoever writes a file of the run knows that the group may read it.

    Raises:
        RunFolderError: The folder cannot be made.
    """
    stamp = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H-%M-%S")
    is_new, made = not runs_folder.exists(), None
    try:
        runs_folder.mkdir(parents=True, exist_ok=True)
        ignore = runs_folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        while True:
            run_id = f"{stamp}-{os.urandom(2).hex()}"
            try:
                (runs_folder / run_id).mkdir(mode=0o700)
                made = runs_folder / run_id
                break
            except FileExistsError:
                continue
        folder = RunFolder(run_id, (runs_folder / run_id).resolve())
        if group is not None:
            os.chown(folder.path, -1, group)
            folder.path.chmod(contract.SHARED_FOLDER)
        for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
            contract.make_private_folder(folder.file(name))
        with private_files(folder):
            write_launcher(folder.path)
    except OSError as error:
        raise abandon(runs_folder if is_new else made, error, place=runs_folder) from error
    return folder


@contextlib.contextmanager
def private_files(folder: RunFolder) -> Iterator[None]:
    """Give all that this process writes meanwhile the rights of a run's folder; its engine and sinks keep the user's umask."""
    is_shared = folder.path.stat().st_mode & contract.SHARED_FOLDER == contract.SHARED_FOLDER
    before = os.umask(0o027 if is_shared else 0o077)
    os.environ[contract.ENV_UMASK] = f"{before:o}"
    try:
        yield
    finally:
        os.umask(before)
        del os.environ[contract.ENV_UMASK]


def abandon(begun: Path | None, error: OSError, *, place: Path | None = None) -> RunFolderError:
    """Remove an unfinished folder and return the error; it names `place` if the system's error names no file."""
    if begun is not None:
        shutil.rmtree(begun, ignore_errors=True)
    return RunFolderError(f"the run folder cannot be made: {error.filename or place or begun}: {system_reason(error)}")


def write_plan(plan: LaunchPlan, folder: Path, *, run_id: str | None = None) -> list[Path]:
    """Write `plan.json`, the engine's files and a `command.sh` that starts the plan when it is run or pasted.

    Args:
        plan: The plan to write.
        folder: The folder to write to; it is made if it does not exist.
        run_id: The run whose files the hosts have. Without one, hosts must see `folder` under the same path, and a script
            that starts a rank is written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {contract.PLAN_FILE: render_plan_json(plan), **plan.engine.files}
    if plan.engine.by_hand is not None and run_id is None:
        plan_path = shlex.quote(str(folder.resolve() / contract.PLAN_FILE))
        texts[contract.START_FILE] = f"{plan.engine.by_hand} {plan_path}\n"
    texts[_COMMAND_FILE] = render_command(plan, folder, run_id=run_id)
    paths = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    script = folder / _COMMAND_FILE
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return paths


def render_command(plan: LaunchPlan, folder: Path, *, run_id: str | None = None) -> str:
    """Render a shell script with the exact command; all values are quoted, so that it can also be pasted."""
    settings = {**plan.engine.environment, **dict.fromkeys(plan.engine.names.folder_variables, "$scratch")}
    if plan.engine.by_hand is not None:
        start = "" if run_id else str(folder.resolve() / contract.START_FILE)
        settings |= {contract.ENV_RUN_ID: run_id or "by-hand", contract.ENV_START: start}
    exports = [
        f'export {name}="{value}"' if "$" in value else f"export {name}={shlex.quote(value)}"
        for name, value in settings.items()
    ]
    argv = [shlex.quote(part) for part in plan.engine.argv]
    lines = [
        "#!/bin/sh",
        f"# {plan.world_size} ranks by {plan.engine.name}; plan {plan.hash[:12]}.",
        "(",
        f"cd {shlex.quote(str(folder.resolve()))} || exit",
        'scratch=$(mktemp -d "${XDG_RUNTIME_DIR:-/tmp}/ttl-XXXXXX") || exit',
        "trap 'rm -rf \"$scratch\"' EXIT",
        "trap 'exit 130' INT",  # some shells forget the other trap when a signal ends them
        "trap 'exit 143' HUP TERM",
        *exports,
        " ".join(argv),
        ")",
    ]
    return "\n".join(lines) + "\n"


def write_environment(
    folder: RunFolder,
    plan: LaunchPlan,
    *,
    versions: Mapping[str, str],
    cpu: str,
    shell: Mapping[str, str],
    given: Collection[str] = (),
) -> None:
    """Write names and origins of the ranks' environment variables; their values are only in `plan.json`."""
    values = {k: plan.secrets.get(v.removeprefix(contract.REFERENCE), v) for k, v in plan.environment.items()}
    from_shell = {name for name, value in values.items() if shell.get(name) == value}
    origins = {name: "shell" if name in from_shell else "plan" for name in plan.environment}
    origins |= dict.fromkeys(given, contract.ENV_OPTION)
    for row in plan.ranks:
        origins |= {name: origins.get(name, f"rank {row.rank}") for name in row.environment}
    content = {
        "python": sys.version.split()[0],
        "platform": sys.platform,
        "cpu": cpu,
        "versions": dict(versions),
        "variables": origins,
    }
    folder.file(contract.ENVIRONMENT_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def append_event(folder: RunFolder, kind: str, **values: Any) -> None:
    """Add a line to `events.jsonl`; the file is the run's history."""
    record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **values}
    with open(folder.file(contract.EVENTS_FILE), "a", encoding="utf-8", opener=open_unlinked) as file:
        file.write(json.dumps(record) + "\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read the complete lines of `events.jsonl`, with `time` as seconds since the epoch."""
    events = []
    for line in Tail(folder / contract.EVENTS_FILE).read(most=_MOST_EVENT_BYTES):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            events.append(read_event(line))
    return events


def read_event(line: bytes | str) -> dict[str, Any]:
    """Parse a line of `events.jsonl`.

    Raises:
        ValueError, KeyError, TypeError: The line is not a valid event.
    """
    event = load(line.encode() if isinstance(line, str) else line)
    if not isinstance(event, dict):
        raise TypeError("it is not an object")
    try:
        return {**event, "time": datetime.fromisoformat(event["time"]).timestamp()}
    except OverflowError as error:
        raise ValueError("its time is no time of a run") from error


def clock_in(event: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the host of an event about a host's clock, and by how many seconds that clock is ahead; None for any other event."""
    host, offset_s = event.get("host"), event.get("offset_s")
    is_valid = isinstance(host, str) and isinstance(offset_s, float) and math.isfinite(offset_s)
    return (str(host), float(offset_s or 0.0)) if event.get("event") == contract.EVENT_CLOCK and is_valid else None


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a short, private folder for sockets and shared-memory files, and remove it at the end of the run.

    It is never on a network file system. Later runs remove the folders that nobody claims any more, because their launchers
    were killed.

    Raises:
        RunFolderError: No such folder can be made.
    """
    bases = [base for base in ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), "/tmp") if base]  # noqa: S108 - the folder itself is private
    base = next((base for base in bases if os.access(base, os.W_OK)), None)
    if base is None:
        raise RunFolderError(f"no writable folder for sockets: tried {', '.join(bases)}")
    remove_abandoned(base)
    folder = tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-", dir=base)
    claimed = claim(folder, "launcher")
    try:
        yield Path(folder)
    finally:
        remove_scratch(folder)
        os.close(claimed)
