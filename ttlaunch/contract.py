"""The contract of launcher, shim and rank: names of variables, places of files in a run folder, and kinds of records.

Python 3.9 and the standard library only: the shim imports this file on hosts that may have nothing else. Whoever
changes a name here changes it for all three, which is why it stands in one place.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

PLAN_FORMAT = 1
"""Raised when `plan.json` changes so that an older shim could misread it; a shim refuses any other number."""

# Set for every rank by its shim, on top of what the plan's row says.
ENV_RUN_ID = "TTLAUNCH_RUN_ID"
ENV_RUN_DIR = "TTLAUNCH_RUN_DIR"
ENV_RANK = "TTLAUNCH_RANK"
ENV_LOCAL_RANK = "TTLAUNCH_LOCAL_RANK"
ENV_WORLD_SIZE = "TTLAUNCH_WORLD_SIZE"
ENV_ROLE = "TTLAUNCH_ROLE"
ENV_HOST = "TTLAUNCH_HOST"
ENV_PLAN = "TTLAUNCH_PLAN"
ENV_START = "TTLAUNCH_START"  # a script to start in place of the run's own on every host; for starting by hand
ENV_TRACE_STEPS = "TTLAUNCH_TRACE_STEPS"  # how many steps a rank is to trace; set by the plan, and only with `--trace`
ENV_NETWORKS = "TTLAUNCH_NETWORKS"  # the networks that the engine told the ranks to use; not set if it named none
ENV_SCRATCH = "TTLAUNCH_SCRATCH"  # the run's private folder in shared memory, on the rank's host
ENV_KEPT_PACKAGE = "TTLAUNCH_KEPT_PACKAGE"  # set where `repro` continues with the ttlaunch that an older run kept
ENV_UMASK = "TTLAUNCH_UMASK"  # the user's, in octal, for what a supervisor starts; its own files are private
ENV_PYTHONPATH = "TTLAUNCH_PYTHONPATH"  # the PYTHONPATH that a program's rank sets for itself; see `at_start`
ENV_FLIP = "TTLAUNCH_FLIP"  # under `chaos`: the verb of a fault, and the step after which this rank flips a bit
ENV_EXCEPTIONS = "TTLAUNCH_EXCEPTIONS"  # the file for its exceptions; likewise only until Python has started
ENV_NO_MPI = "TTLAUNCH_NO_MPI"  # set while Python starts in a rank that cannot use MPI; likewise
ENV_WARM = "TTLAUNCH_WARM"  # set where Python starts to become the process that forks ranks, see `agent/forked_rank.py`
ENV_MASTER_ADDR = "TTLAUNCH_MASTER_ADDR"  # where rank 0 of a program listens; only shims get it, as the next three
ENV_MASTER_PORT = "TTLAUNCH_MASTER_PORT"
ENV_PEERS = "TTLAUNCH_PEERS"  # a JSON list: where each rank listens for the ranks of other hosts, `address:port`
ENV_CERTIFICATES = "TTLAUNCH_CERTIFICATES"  # a JSON object of texts in PEM: `authority`, `own`, `key`
ENV_WORLD = "TTLAUNCH_WORLD"  # the run whose ranks a rank takes part with, where a run of its own has started it
ENV_INCARNATION = "TTLAUNCH_INCARNATION"  # the one that a worker that joins by itself has from its coordinator
ENV_MEMORY = "TTLAUNCH_MEMORY"  # the bytes that a control group allows this rank, if it is less than all of the machine
ENV_ANSWERS_AT = "TTLAUNCH_ANSWERS_AT"  # the path of the socket on which the head of a serving run takes asks
ENV_RESTARTS = "TTLAUNCH_RESTARTS"  # how often the run has been restarted
ENV_MOST_RESTARTS = "TTLAUNCH_MOST_RESTARTS"
PREFIX = "TTLAUNCH_"
# What torchrun's variables say of a rank's place among all ranks: no value is right for every rank.
TORCH_PLACE = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
)
ENV_OPTION = "--env"  # the origin of a variable, in `environment.json`, that this option set
BY_HAND = "by-hand"  # the run id of ranks that no launcher watches

# A value `env:NAME` stands for the variable NAME of the launching shell; its value is never written down.
REFERENCE = "env:"
SECRET_PREFIX = "TTLAUNCH_SECRET_"  # noqa: S105 - names of variables for secret values that have none of their own


def referred_variable(value: str) -> str | None:
    """Return the NAME of a value `env:NAME`; None for any other value."""
    name = value[len(REFERENCE) :] if value.startswith(REFERENCE) else ""
    return name if name.isidentifier() and name.isascii() else None


def fill_references(variables: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with each value `env:NAME` replaced by the value of NAME.

    Raises:
        LookupError: If `values` does not have a NAME.
    """
    filled = {}
    for name, value in variables.items():
        referred = referred_variable(value)
        if referred is not None and referred not in values:
            raise LookupError(f"the value of `{value}` for {name} did not reach this host")
        filled[name] = value if referred is None else values[referred]
    return filled


def fill_command(arguments: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Put secret values back into a command line, in place of `env:TTLAUNCH_SECRET_0` or `--password=env:TTLAUNCH_SECRET_0`.

    Raises:
        LookupError: If `values` does not have a secret.
    """
    filled = []
    for argument in arguments:
        before, found, number = argument.rpartition(f"{REFERENCE}{SECRET_PREFIX}")
        if found and number.isdigit() and before[-1:] in ("", "="):
            if SECRET_PREFIX + number not in values:
                raise LookupError(f"the value of `{argument}` in the command did not reach this host")
            argument = before + values[SECRET_PREFIX + number]  # noqa: PLW2901 - the same argument, with its secret again
        filled.append(argument)
    return filled


# The run folder on the launching machine.
PLAN_FILE = "plan.json"
TRAIN_FILE = "train.yaml"
ENVIRONMENT_FILE = "environment.json"
CODE_FILE = "code.json"
LAUNCHER_FILE = "launcher.json"  # which process watches the run, see `running/runs/launcher.py`
EVENTS_FILE = "events.jsonl"
EVENT_CLOCK = "clock"  # host, offset_s: by how much a host's clock is ahead of this machine's
EVENT_PREPARED = "prepared"  # marks: when each part of a run's preparation began; see `running/start_times.py`
METRICS_FILE = "metrics.jsonl"  # all that the run measured, an event a line; see `running/metrics/event_log.py`
REPORT_FILE = "report.json"
TRACE_FILE = "trace.json"  # the timelines of all ranks in one, in Chrome's format
SIMULATION_FILE = "simulation.json"  # of `ttlaunch simulate`: mistakes in messages, and how many were sent to whom
LOGS_DIR = "logs"
SINKS_DIR = "sinks"  # each sink's record, its messages, and its data unless the user named another place; only in runs with sinks
ENGINE_PROCESS = "mpirun"  # what the history and the names of logs call the engine's process on the launching machine, for any engine
RECORDS_DIR = "records"
STACKS_DIR = "stacks"
STACKS_SIGNAL = 62  # has a rank of a Python program write its stacks; SIGUSR2 may have a meaning in the script itself
FLIGHT_RECORDER_DIR = "blackbox"  # in the run folder only after a bad end
COORDINATOR_FILE = "coordinator.json"  # where the run's coordinator listens for the user's own processes
ENDING_FILE = "ending.json"  # the launcher's order to end, on every host: `after_step`, None for a program


def stdout_file(rank: int) -> str:
    """The rank's standard output, byte for byte, relative to the run folder."""
    return f"{LOGS_DIR}/rank-{rank}.stdout"


def stderr_file(rank: int) -> str:
    """The rank's standard error, byte for byte, relative to the run folder."""
    return f"{LOGS_DIR}/rank-{rank}.stderr"


def times_file(rank: int) -> str:
    """When each piece of the rank's output was printed; see `agent/rank_output.py`."""
    return f"{LOGS_DIR}/rank-{rank}.times"


def stacks_file(rank: int) -> str:
    """What every thread of the rank was doing, each time it was asked by a signal; empty if it never was."""
    return f"{STACKS_DIR}/rank-{rank}.txt"


def progress_file(rank: int) -> str:
    """The rank's progress, one JSON object a line, such as `{"kind": "step", "time": …, "step": …, …}`."""
    return f"{RECORDS_DIR}/rank-{rank}.progress.jsonl"


def error_file(rank: int) -> str:
    """Written by a rank whose role raised: type, message, traceback, file, line, step, time."""
    return f"{RECORDS_DIR}/rank-{rank}.error.json"


def torch_error_file(rank: int) -> str:
    """Written by torch's `@record` in a rank of a Python program, in torch's own format; nothing reads it."""
    return f"{RECORDS_DIR}/rank-{rank}.torch-error.json"


def exceptions_file(rank: int) -> str:
    """Written by the rank: the exceptions that ended it or were about to, a line each; the last line counts."""
    return f"{RECORDS_DIR}/rank-{rank}.exceptions.jsonl"


def recorder_file(rank: int) -> str:
    """A rank's recording: below the run's folder in shared memory while it lives, in the run folder after a bad end."""
    return f"{FLIGHT_RECORDER_DIR}/rank-{rank}.box"


def traffic_file(rank: int) -> str:
    """What the rank sent to whom, for what, and how long it waited, a line for each stretch of steps; see `TRAFFIC_FORMAT`."""
    return f"{RECORDS_DIR}/rank-{rank}.ledger.jsonl"


def trace_file(rank: int) -> str:
    """What the rank did when, on its own clock, an event a line; only where `ENV_TRACE_STEPS` asks for it."""
    return f"{RECORDS_DIR}/rank-{rank}.trace.jsonl"


def exit_file(rank: int) -> str:
    """Written by the shim when its rank has ended: status or signal, times, peak memory."""
    return f"{RECORDS_DIR}/rank-{rank}.exit.json"


def orders_socket(number: int) -> str:
    """Where a worker of an elastic run receives its orders, a datagram each; relative to the run's private folder on its host."""
    return f"rank-{number}.orders"


LARGEST_ORDER = (
    128 * 1024
)  # bytes of an order to a worker; a datagram of this size fits into the kernel's usual buffers

ORDER_TO_SAVE = b"save"
"""The order to a worker of an elastic run whose coordinator is gone: save the state from memory on this host, and end."""

SAVE_S = 30.0  # how long workers with this order may take before they are killed

LAST_STATES_DIR = "last_states"
"""Where a worker with `ORDER_TO_SAVE` writes, in the run's folder on its host: `step-N/`, with a shard and its record."""


def last_state_dir(step: int) -> str:
    """The folder of a saved state, relative to the run's folder on the host; complete if it has this name."""
    return f"{LAST_STATES_DIR}/step-{step}"


TRAFFIC_FORMAT = 1
"""A line of a traffic file is an object: `format`; `first`, `last`: the steps it covers, 0 for all before the first step;

`sent`: `[operation, bucket, phase, dest, [[first, last, stride, messages, bytes], …]]`, where messages and bytes are those
of each single step; `waited`: `[operation, phase, {step: µs}]`; `spent`: `[phase, {step: µs}]`, where the phase `step` is
a whole step up to its report; `facts`: values of the rank that formulas need, such as `values` of its part of the model.
"""

# Checkpoints: ranks write shards into `checkpoints/step-N.tmp/`; the launcher completes it and renames it to `step-N/`.
CHECKPOINT_FORMAT = 1
CHECKPOINTS_DIR = "checkpoints"
CHECKPOINT_MANIFEST = "manifest.json"
PROVENANCE_FILE = "provenance.json"  # of a run that resumed: the chain of its first checkpoint's predecessors
UNFINISHED_SUFFIX = ".tmp"
OPTIMIZER_PREFIX = "optimizer."
AVERAGE_PREFIX = f"{OPTIMIZER_PREFIX}polyak."
"""Prefixes of names in a shard: of the optimizer's tensors, and of averaged weights. Weights have the model's names."""


def checkpoint_dir(step: int) -> str:
    """The folder of a complete checkpoint, relative to the run folder."""
    return f"{CHECKPOINTS_DIR}/step-{step}"


def shard_file(rank: int) -> str:
    """What a rank owns of a checkpoint, as safetensors; relative to the checkpoint's folder."""
    return f"rank-{rank}.safetensors"


def shard_record(rank: int) -> str:
    """Written once the shard is complete: its size, SHA-256 and names, `owners` (whose shards make up the checkpoint), `state`."""
    return f"rank-{rank}.json"


# Rights. A run's folder has mode 0700, or 2750 where the user shares the run with a group; files and folders in it are
# readable for the same users.
_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_SHARED_FILE, SHARED_FOLDER = 0o640, 0o2750


def open_private(path: str, flags: int) -> int:
    """Open a file of a run's folder for writing, as `opener` of `open`; only the user, or the run's group, can read it."""
    flags |= os.O_CLOEXEC
    if not _is_shared(path):
        return os.open(path, flags, _PRIVATE_FILE)
    descriptor = os.open(path, flags, _SHARED_FILE)
    os.fchmod(descriptor, _SHARED_FILE)  # whatever the umask is: the user has asked for it
    return descriptor


def make_private_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder in a run's folder with the rights of its parent, unless it exists."""
    try:
        os.mkdir(path, _PRIVATE_FOLDER)  # noqa: PTH102 - as below
    except FileExistsError:
        return
    if _is_shared(os.fspath(path)):
        os.chmod(path, SHARED_FOLDER)  # noqa: PTH101 - as below


def _is_shared(path: str) -> bool:
    folder = os.stat(os.path.dirname(path) or os.curdir)  # noqa: PTH116, PTH120 - pathlib costs the shim a third of its start-up
    return folder.st_mode & SHARED_FOLDER == SHARED_FOLDER


# On a host, a run's folder is `<remote folder>/runs/<id>/`. It has the start script beside the files above.
RUNS_DIR = "runs"
START_FILE = "start"

# Kinds of progress records; each also carries `time` (seconds since the epoch, float).
KIND_STARTED = "started"  # the shim started the rank's process: pid
KIND_STARTING = "starting"  # stage: one of `START_STAGES`, which the rank begins before its role is called
KIND_READY = "ready"  # the runtime has the world and calls the role: total_steps
KIND_STEP = "step"  # an optimizer step is done: step, and any of loss, tokens or samples, grad_norm, learning_rate, …
COUNTED = ("tokens", "samples")  # in a step or a validation, what counts in the loss: of texts, or of images and others
OWN = "own_"  # before the name of what counts, in a step of an elastic run: of the micro-batches that the member has differentiated itself
KIND_VALIDATION = "validation"  # step, loss, tokens or samples, perplexity or accuracy
ARRIVED_FROM = "arrived_from"  # in a step that applied one gradient, in order of arrival: the rank that sent it
KIND_UPDATE = "update"  # step, task, parts: what an update was made of, where gradients may be older than the weights that they change
KIND_LAYER_NORMS = "layer_grad_norms"  # step, norms: {layer: norm of its gradient}, of the layers that the rank updates
KIND_LOST_CHECKPOINT = "lost_checkpoint"  # step, reason: the rank could not write its shard, and training goes on
KIND_AUDIT, KIND_AUDIT_VOTE = "audit", "audit_vote"  # see `records/audits.py`
KIND_NOT_FINITE = "not_finite"  # step, micro_batch, loss: the first micro-batch of a step whose loss is NaN or infinite
KIND_STOPPING = "stopping"  # step: the rank has heard that the run is to end, and begins no later step by itself
KIND_NOTE = "note"  # text: a line worth showing to the user
KIND_PARAMETERS = "parameters"  # digests: {parameter name: SHA-256 of name, shape, dtype and bytes}
KIND_DIGESTS = (
    "digests"  # step, digests: 16 hexadecimal digits for each tensor; names: of the tensors, if they have changed
)
KIND_TRAINS_ALONE = (
    "trains_alone"  # a script's rank has run a backward pass, and its process has joined no group of torch
)
KIND_JOINED_GROUP = "joined_group"  # such a rank has joined one after all
KIND_PRINTED = "printed"  # values: numbers that a script printed in a line, by name; step, if the line names one
KIND_USAGE = "usage"  # what the processes of a script's rank use of their host
KIND_RESULT = "result"  # values: what the recipe wants in the summary, by name
KIND_DONE = "done"  # the role's function returned
KIND_MEMBER = "member"  # what a worker of an elastic run tells the coordinator: what, incarnation, epoch, applied, …

START_STAGES = ("joining the other ranks", "reading the data", "importing torch", "connecting the ranks")
"""What a rank of a recipe does between its start and the call of its role, in this order."""

STAGE_SETTING_UP, STAGE_FIRST_PASS = "setting up", "the first backward pass"
"""Stages of a rank of a script, which also imports torch and joins the other ranks; see `torch_hooks/`."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def append_progress(path: str | os.PathLike[str], *records: Mapping[str, Any]) -> None:
    """Append records to the progress of a script's rank; do nothing if the run is over, its folder gone, or the disk full.

    The training is worth more than the records.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(descriptor, "".join(map(record_line, records)).encode())
    except OSError:
        return
    finally:
        os.close(descriptor)


def record_line(record: Mapping[str, Any]) -> str:
    """Render a record as a line of JSON; NaN and infinities become strings such as `"nan"`."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def read_record(line: bytes | str) -> dict[str, Any] | None:
    """Read a line that `record_line` made, with NaN and infinities as numbers again; None for any other line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return _as_written(record) if isinstance(record, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return {name: _finite(part) for name, part in value.items()} if isinstance(value, dict) else value


def _as_written(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, list):
        return [_as_written(part) for part in value]
    return {name: _as_written(part) for name, part in value.items()} if isinstance(value, dict) else value


STATUS_DONE = 0
STATUS_RANK_FAILED = 1
STATUS_USAGE = 2
STATUS_DESCRIPTION = 3
STATUS_HOST = 4
STATUS_SYNC = 5
STATUS_HUNG = 6
STATUS_HOST_LOST = 7
STATUS_NO_PROGRESS = 8
STATUS_TIME_LIMIT, STATUS_AUDIT = 9, 10
STATUS_INTERRUPTED, STATUS_CLOSED_PIPE = 130, 141
STATUS_TERMINATED = 143
"""Exit statuses of `ttlaunch`, as documented in `docs/reference/exit-statuses.md`."""

# Layout of the remote folder: `sync` fills it, runs read it.
RELEASES_DIR = "releases"
CURRENT_LINK = "current"  # to the newest release, swapped by one rename
DATA_DIR = "data"  # texts that are not part of a release, named by their SHA-256
SPARE_DIR = "spare"  # a copy of the newest release, from which the next sync makes its own

# Layout of a release, `releases/<tree hash>/`.
PROJECT_DIR = "project"  # the user's folder
PACKAGE_DIR = "package"  # on PYTHONPATH of ranks: it holds `ttlaunch/`
RECIPES_DIR = "recipes"  # of recipes that lie outside the project
MANIFEST_FILE = "manifest"  # its SHA-256 is the tree hash


def release_lock(tree_hash: str) -> str:
    """The file that a run holds a shared `flock` on, so that no sync removes its release; below the remote folder."""
    return f"{RELEASES_DIR}/{tree_hash}.lock"


def peer_name(rank: int) -> str:
    """Return the name of a rank in the certificate of its host."""
    return f"rank-{rank}"


COORDINATOR_NAME = "coordinator"
"""The name in the certificate of a run's coordinator, by which workers know it whatever its address is."""


def worker_name(number: int) -> str:
    """Return how views and messages name a worker; names sort as numbers do."""
    return f"worker-{number:04d}"


AGENT_VERSION = 7
"""Raised when the frames between launcher and agent change; each refuses the frames of another version.

A launcher starts agents of its own version, but the package may be upgraded while both run."""

LEASE_S = 15.0  # how long ranks of a host run on without a frame from the launcher; then the agent kills them


def beat_s(lease_s: float) -> float:
    """Return the seconds after which launcher and agent send each other a sign of life, so that a lease outlasts a lost one."""
    return min(1.0, lease_s / 6)


STEP_PIPE = (
    9  # in a step of a Slurm job: the descriptor of a pipe that the step's shell reads until all daemons have ended
)
AFTER_LEASE_S = 5.0  # how long after the lease ranks of a lost host have surely ended and may be started elsewhere

# Frames: how launcher and agents talk over a host's standard streams. A header (JSON, an object) and a body (bytes).
_FRAME = struct.Struct(">II")
LARGEST_HEADER = 16 * 1024 * 1024
LARGEST_BODY = 64 * 1024 * 1024
MOST_VALUES = 500_000
"""The most values of one record or header. A value of two bytes, such as `{}`, takes thirty times as much memory."""


def pack_frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Encode a frame: two lengths (unsigned, 4 bytes each, big endian), the header, the body."""
    text = json.dumps(header).encode()
    return _FRAME.pack(len(text), len(body)) + text + body


def send_frame(header: Mapping[str, Any], body: bytes = b"") -> None:
    """Write a frame to standard output, as a script on a host does, at once."""
    sys.stdout.buffer.write(pack_frame(header, body))
    sys.stdout.buffer.flush()


def read_frame(
    read: Callable[[int], bytes], *, largest_body: int = LARGEST_BODY
) -> tuple[dict[str, Any], bytes] | None:
    """Read the next frame; None if the stream ends after a complete frame.

    Args:
        read: Called with a number of bytes; returns at least one and at most so many, none at the end of the stream.
        largest_body: The longest body, in bytes, that is accepted.

    Raises:
        ValueError: If the bytes are no frame, such as a greeting that a login shell prints.
        EOFError: If the stream ends within a frame.
    """
    lengths = _read_all(read, _FRAME.size)
    if lengths is None:
        return None
    header_length, body_length = _FRAME.unpack(lengths)
    if header_length > LARGEST_HEADER or body_length > largest_body:
        raise ValueError(f"not a frame: {lengths!r}")
    text, body = _read_all(read, header_length), _read_all(read, body_length)
    if text is None or body is None:
        raise EOFError("the stream ended within a frame")
    try:
        header = json.loads(text) if most_values(text) <= MOST_VALUES else None
    except RecursionError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"not a frame: {lengths!r}")  # noqa: TRY004 - the stream is wrong, not the caller
    return header, body


def most_values(text: bytes) -> int:
    """Return how many values a JSON text has at most, without parsing it: punctuation within strings counts too."""
    return text.count(b",") + text.count(b"[") + text.count(b"{") + 1


def _read_all(read: Callable[[int], bytes], size: int) -> bytes | None:
    """Read exactly `size` bytes; None if the stream ends before the first of them."""
    parts: list[bytes] = []
    missing = size
    while missing:
        part = read(missing)
        if not part:
            if missing == size:
                return None
            raise EOFError("the stream ended within a frame")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
