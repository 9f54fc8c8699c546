"""What hosts, shims and ranks write, for `fuzz.py`: frames of agents, records of ranks, answers of probes and scripts.

Each case goes as far as in a run: pieces are written to a folder, records are folded into the state of their rank and reported,
facts are judged and shown.
"""

import contextlib
import json
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from fuzz_cases import Sample, Target, mutated, other_bytes, other_values

from ttlaunch import contract
from ttlaunch.app.examine import Examination
from ttlaunch.app.run_diagnostics import failure_diagnostic
from ttlaunch.cli.doctor_view import render_lines
from ttlaunch.diagnostics import Diagnostic, Source, render
from ttlaunch.engines.choose import ENGINES
from ttlaunch.errors import HostError
from ttlaunch.flight_recorder import MAGIC, SIZE, WORD_MAGIC
from ttlaunch.hosts.doctor.checks import check_everything
from ttlaunch.hosts.doctor.facts import Clock, facts_as_json, parse_facts
from ttlaunch.hosts.doctor.network import choose_network
from ttlaunch.hosts.prepare.kind import parse_kind
from ttlaunch.hosts.sync.refusals import explain_refusal
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records import host_scripts
from ttlaunch.records.agents import FilePiece, parse_agent_frame
from ttlaunch.records.parser import LONGEST_RECORD, BadRecord, parse
from ttlaunch.records.telemetry import read_trace_event
from ttlaunch.running.agents.agent_starter import write_piece
from ttlaunch.running.failures.attribution import Witnesses, first_failure
from ttlaunch.running.failures.stderr_tail import read_stderr_tail
from ttlaunch.running.flight_recorders import last_operations
from ttlaunch.running.hang.stacks import frame_to_report, parse_main_stack
from ttlaunch.running.logs.merge import RankOutputs
from ttlaunch.running.metrics.telemetry import TelemetryReader
from ttlaunch.running.report import Report
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.model import Topology

TIME = 1_790_000_000.5
ROWS = (RankRow(0, "box", 0, "worker"), RankRow(1, "box", 1, "aggregator"))
_MOST_WRITTEN = 1 << 28

FRAMES = [
    ({"kind": "ready", "version": contract.AGENT_VERSION, "time": TIME, "clock": 5.0, "done": 0, "pid": 7}, b""),
    ({"kind": "alive", "clock": 5.0, "done": 3}, b""),
    ({"kind": "file", "name": "records/rank-1.exit.json", "offset": 0, "whole": True, "number": 1}, b'{"time": 1.0}'),
    ({"kind": "file", "name": "logs/rank-0.stdout", "offset": 0, "whole": False, "number": 2}, b"hello\n" * 20),
    ({"kind": "file", "name": "checkpoints/step-10.tmp/rank-0.json", "offset": 0, "whole": True, "number": 3}, b"{}"),
    ({"kind": "lost_shim", "rank": 1, "time": TIME}, b""),
    ({"kind": "looked", "question": 1, "stopped": [0], "faults": [[0, 7], [1, 8]]}, b""),
    ({"kind": "ranks_ended", "status": 137, "said": "shim of rank 1 was killed by signal 9\n"}, b""),
    ({"kind": "gone", "reason": "ended"}, b""),
    ({"kind": "ended", "killed": 2}, b""),
]


class _Answers:
    """A process that has written these bytes and ended."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, most: int, *, timeout_s: float) -> bytes:  # noqa: ARG002 - the bytes are there
        part = self._data[self._at : self._at + min(most, 65536)]
        self._at += len(part)
        return part

    def stderr(self) -> bytes:
        return b""


def frames() -> Target:
    """Streams of an agent's frames, whose pieces of files are written into a run's folder."""
    scratch = tempfile.TemporaryDirectory(prefix="ttl-fuzz-")
    folder = Path(scratch.name)

    def read_stream(data: bytes) -> None:
        stream = FrameStream("box", _Answers(data))
        while (frame := stream.receive(timeout_s=60.0, largest_body=LONGEST_RECORD)) is not None:
            header, body = frame
            said = parse_agent_frame(header, ranks=[0, 1], last_step=100)
            if isinstance(said, BadRecord):
                assert len(said.reason) < 1000
                said.reason.encode()
            elif isinstance(said, FilePiece):
                with contextlib.suppress(ValueError):
                    write_piece(folder / said.name, said, body)
                    assert (folder / said.name).stat().st_size < _MOST_WRITTEN

    def make(dice: random.Random, samples: Sequence[Sample]) -> Sample:
        packed = []
        for header, body in dice.sample(FRAMES, dice.randint(1, 4)):
            text = json.dumps(header).encode()
            if dice.random() < 0.7:
                text = other_values(dice, text) or text
            lengths = [len(text), len(body)]
            if dice.random() < 0.1:
                lengths[dice.randint(0, 1)] = dice.choice((0, 1, 2**24, 2**26, 2**26 + 1, 2**31, 2**32 - 1))
            packed.append(b"".join(length.to_bytes(4, "big") for length in lengths) + text + body)
        data = b"".join(packed)
        return Sample(other_bytes(dice, data, packed) if dice.random() < 0.3 else data, samples[0].read)

    whole = b"".join(contract.pack_frame(*frame) for frame in FRAMES)
    return Target((Sample(whole, read_stream),), (HostError,), make, scratch.cleanup)


PROGRESS = [
    {"kind": "started", "time": TIME, "pid": 12, "shim_pid": 11, "host": "box"},
    {"kind": "ready", "time": TIME, "total_steps": 100},
    {"kind": "step", "time": TIME, "step": 3, "loss": 2.5, "tokens": 64, "grad_norm": 0.5, "arrived_from": 1},
    {"kind": "validation", "time": TIME, "step": 0, "loss": 4.0, "tokens": 64, "perplexity": 54.6},
    {"kind": "layer_grad_norms", "time": TIME, "step": 3, "norms": {"embedding": 0.5, "blocks.0": 1.5}},
    {"kind": "lost_checkpoint", "time": TIME, "step": 20, "reason": "disk full"},
    {"kind": "stopping", "time": TIME, "step": 7},
    {"kind": "note", "time": TIME, "text": "all well"},
    {"kind": "parameters", "time": TIME, "digests": {"w": "0" * 64}},
    {"kind": "result", "time": TIME, "values": {"stale gradients": 3, "network": "eth0"}},
    {"kind": "done", "time": TIME},
    {"kind": "of_my_own", "time": TIME, "step": 1, "colour": "red"},
]
EXIT = {"rank": 0, "pid": 12, "started": TIME, "time": TIME, "status": 1, "signal": None, "left_early": False}
EXIT |= {"peak_memory_bytes": 300_000_000, "oom_kills": None, "memory_limit_bytes": None, "left_behind": 0}
EXIT |= {"unkept_output": {"stdout": 5}, "unkept_reason": "no space"}
ERROR = {
    "type": "ValueError",
    "message": "no",
    "traceback": "…",
    "file": __file__,
    "line": 3,
    "step": 1,
    "role": "worker",
}
ERROR |= {"time": TIME}
SHARD = {"format": 1, "step": 20, "owners": [0, 1], "state": {"step": 20, "seen": [1, [2]]}, "size": 1000}
SHARD |= {"sha256": "0" * 64, "tensors": ["w", "optimizer.w"]}
STRETCH = {
    "format": contract.TRAFFIC_FORMAT,
    "first": 0,
    "last": 4,
    "facts": {"values": 1000},
    "sent": [["gradients", None, "backward", 1, [[1, 4, 1, 2, 100]]], ["losses", 2, "start", 1, [[0, 0, 1, 1, 8]]]],
    "waited": [["weights", "exchange", {"1": 1500}]],
    "spent": [["step", {"1": 6000}]],
}
MESSAGE = {"peer": 1, "tag": 3, "number": 1, "bytes": 100, "step": 1}
EVENTS = [
    ["clock", 1000, -5, 3],
    ["span", "step 1", "step", 1000, 2000, {"micro_batch": 0}],
    ["send", "gradients", 1000, MESSAGE],
    ["recv", "gradients", 1000, MESSAGE],
]
STACK = f'Thread 0x1 (most recent call first):\n  File "{__file__}", line 3 in f\n'
LOG = f'warming up\nTraceback (most recent call last):\n  File "{__file__}", line 3, in f\nValueError: no\n'
TIMES = f"{TIME} 1 20\n{TIME} 2 {len(LOG)} end\n"
BOX = bytes(8 * WORD_MAGIC) + MAGIC.to_bytes(8, "little") + bytes(SIZE - 8 * WORD_MAGIC - 8)


def records() -> Target:
    """Files of a rank in a run's folder, which are followed and reported as in a run."""
    scratch = tempfile.TemporaryDirectory(prefix="ttl-fuzz-")
    folder = RunFolder("fuzz", Path(scratch.name))
    for name in (contract.LOGS_DIR, contract.RECORDS_DIR, contract.STACKS_DIR, contract.FLIGHT_RECORDER_DIR):
        folder.file(name).mkdir()
    for name in (contract.stdout_file(0), contract.stderr_file(0)):
        folder.file(name).write_text(LOG)

    def read_file(name: str, data: bytes) -> None:
        path = folder.file(name)
        path.write_bytes(data + b"\n")
        try:
            _follow_and_report(folder)
        finally:
            path.unlink()

    def lines(data: bytes) -> None:
        for line in data.splitlines():
            read_trace_event(line)

    def of(name: str, content: object) -> Sample:
        return Sample(json.dumps(content).encode(), partial(read_file, name))

    return Target(
        (
            *(of(contract.progress_file(0), one) for one in PROGRESS),
            of(contract.exit_file(0), EXIT),
            of(contract.error_file(0), ERROR),
            of(contract.traffic_file(0), STRETCH),
            *(Sample(json.dumps(one).encode(), lines) for one in EVENTS),
            Sample(json.dumps(SHARD).encode(), partial(_as_record, "ShardRecord")),
            Sample(TIMES.encode(), partial(read_file, contract.times_file(0))),
            Sample(STACK.encode(), partial(read_file, contract.stacks_file(0))),
            Sample(BOX, partial(_read_box, folder)),
            Sample(LOG.encode(), partial(_read_log, folder)),
        ),
        close=scratch.cleanup,
    )


def _as_record(kind: str, data: bytes) -> None:
    from ttlaunch.records import endings
    from ttlaunch.records.parser import read

    found = read(getattr(endings, kind), data)
    assert not isinstance(found, BadRecord) or found.reason.encode()


def _read_box(folder: RunFolder, data: bytes) -> None:
    path = folder.file(contract.recorder_file(0))
    path.write_bytes(data.ljust(SIZE, b"\0")[:SIZE])
    last_operations(folder.path, Watch(SimpleNamespace(ranks=ROWS), folder).ranks, end=TIME)
    path.unlink()


def _read_log(folder: RunFolder, data: bytes) -> None:
    path = folder.file(contract.stderr_file(0))
    path.write_bytes(data)
    read_stderr_tail(path)
    path.write_text(LOG)


def _follow_and_report(folder: RunFolder) -> None:
    """Do with a run's records what its supervisor does."""
    watch = Watch(SimpleNamespace(ranks=ROWS), folder)
    watch.set_clock("box", 3600.0)
    watch.poll()
    outputs = RankOutputs(folder.path, [0, 1])
    outputs.poll(watch.clock_offsets())
    outputs.finish(watch.clock_offsets())
    list(TelemetryReader(folder.path, 0, world_size=2).steps())
    stacks = folder.file(contract.stacks_file(0))
    if stacks.is_file():
        frame_to_report(parse_main_stack(stacks.read_text(errors="replace")))
    tails = Witnesses(stderr_tail=lambda rank: read_stderr_tail(folder.file(contract.stderr_file(rank))))
    failure = first_failure(watch.ranks, lost_shims={}, stopped=False, witnesses=tails)
    known = dict.fromkeys(Report.__dataclass_fields__)
    report = Report(**{**known, "failure": failure, "ranks": ({"rank": 0}, {"rank": 1})})
    diagnostic = failure_diagnostic(report, folder)
    if diagnostic is not None:
        render([diagnostic])
    for bad in watch.bad.fresh():
        bad.reason.encode()


FACTS = {
    "hostname": "a",
    "user": "me",
    "uid": 1000,
    "home": "/h",
    "machine": "m",
    "kernel": "6.1",
    "cpu": {"model": "x", "architecture": "x86_64", "count": 8, "usable": 7.5, "flags": ["avx2"]},
    "memory": {"total_bytes": 2**36, "available_bytes": 2**35},
    "disk": {
        "path": "/h/.ttlaunch",
        "nearest": "/h",
        "file_system": "ext4",
        "total_bytes": 2**40,
        "free_bytes": 2**30,
        "free_inodes": None,
        "problem": "read-only",
    },
    "limits": {"nofile": [1024, None], "memlock": [65536, None]},
    "shm": {"total_bytes": 2**34, "free_bytes": 2**20, "noexec": False, "writable": True},
    "rdma": ["mlx5_0"],
    "devices": {"nvidia": ["H200, 141 GB"], "nvidia_problem": "no driver", "tenstorrent": [], "gpu_files": []},
    "interfaces": [
        {"name": "eth0", "address": "10.0.0.5/24", "mtu": 1500, "up": True, "speed_mbit": 1000, "bridge": False},
        {"name": "eth1", "address": "10.1.0.5/24", "mtu": 9000, "up": True, "speed_mbit": None, "bridge": False},
    ],
    "default_interface": "eth0",
    "python": {"executable": "/p", "version": [3, 11, 2], "prefix": "/", "packages": {"torch": "2"}, "tried": ["/p"]},
    "tried": ["/p"],
    "mpi": {
        "mpirun": "/p/mpirun",
        "prefix": "/p",
        "says": "mpirun (Open MPI) 5.0.11",
        "library": "/l",
        "abi": "openmpi",
    },
    "names": {"b": ["10.0.0.6"], "a": ["10.0.0.5"]},
    "leftovers": [{"pid": 5, "run_id": "r", "age_s": 1.5, "command": "c"}],
    "folders": ["/dev/shm/ttl-1"],  # noqa: S108 - an answer
    "unanswered": ["devices"],
}
ANSWERS: list[tuple[type, object]] = [
    (host_scripts.HostClock, {"kind": "clock", "time": 1.5}),
    (host_scripts.Listening, {"kind": "listening", "port": 40000, "problem": None}),
    (host_scripts.Reached, {"kind": "reached", "results": [["node1", 0.001, None], ["node2", None, "refused"]]}),
    (host_scripts.Measured, {"kind": "measured", "latency_s": 1e-4, "bytes_per_s": 1e9}),
    (host_scripts.SyncMessage, {"kind": "want", "id": "5:7", "files": 3, "bytes": 1000}),
    (
        host_scripts.SyncEnd,
        {"kind": "done", "folder": "/f", "there": True, "repaired": [], "pruned": ["a"], "differing": [], "data": {}},
    ),
    (host_scripts.SyncRefusal, {"why": "case", "names": ["a/B", "a/b"]}),
    (
        host_scripts.FoundPythons,
        {"base": {"path": "/p", "version": "3.11.2", "libc": "glibc 2.36"}, "found": [{"path": "/p", "version": None}]},
    ),
    (host_scripts.InstallMessage, {"kind": "need", "wheels": {"a": 0}}),
    (host_scripts.EnvironmentAnswer, {"kind": "ready", "made": True, "environment": "/e", "python": "3.11.2"}),
    (host_scripts.LeftOver, {"processes": [{"pid": 5, "name": "x"}], "folders": ["/f"], "clean_after_s": None}),
]


def probes() -> Target:
    """The answer of one of two hosts, which are judged and shown as by `ttlaunch doctor`; and the answers of other scripts."""
    hosts, _ = parse_hosts(Source("hosts.txt", "a slots=2\nb slots=2\n"))
    topology = Topology("lab", None, tuple(hosts))
    healthy = parse_facts(
        {**FACTS, "machine": "n", "interfaces": [{**FACTS["interfaces"][0], "address": "10.0.0.6/24"}]},
        clock=Clock(0.0, 0.1),
    )

    def judge(data: bytes) -> None:
        content = _header(data)
        if not isinstance(content, dict):
            return
        try:
            facts = {"a": parse_facts(content, clock=Clock(-5.0, 5.0)), "b": healthy}
        except ValueError:
            return
        found = check_everything(facts, topology=topology, engine=ENGINES[0].signature, launcher=healthy)
        choice = choose_network(facts, wanted=None, connections={"a": ("10.0.0.1", "10.0.0.5")})
        known = Examination(["a", "b"], ENGINES[0].signature, {"a": "ready", "b": "ready"}, facts)
        known.choice = None if isinstance(choice, Diagnostic) else choice
        render([*found, *([choice] if isinstance(choice, Diagnostic) else [])])
        render_lines(known)
        json.dumps(facts_as_json(facts["a"]), allow_nan=False)

    def answer(cls: type, data: bytes) -> None:
        found = parse(cls, _header(data))
        if isinstance(found, host_scripts.SyncRefusal):
            explain_refusal("a", found)
        if isinstance(found, host_scripts.FoundPythons) and found.base is not None:
            parse_kind(found.base).platforms()

    scripts = [Sample(json.dumps(content).encode(), partial(answer, cls)) for cls, content in ANSWERS]

    def make(dice: random.Random, samples: Sequence[Sample]) -> Sample:
        return mutated(dice, samples if dice.random() < 0.3 else samples[:1])

    return Target((Sample(json.dumps(FACTS).encode(), judge), *scripts), (HostError,), make)


def _header(data: bytes) -> object:
    """The header of a frame with this text, as it comes from a host."""
    packed = len(data).to_bytes(4, "big") + bytes(4) + data
    frame = FrameStream("box", _Answers(packed)).receive(timeout_s=60.0)
    return frame and frame[0]
