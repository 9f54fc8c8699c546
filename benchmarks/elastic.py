"""Kill one of two workers, and time how long the other needs to a step of its own: an elastic run, and torchft beside it.

    python benchmarks/elastic.py [--times 10] [--stopped 5] [--torchft FOLDER] [--minutes 10] [--seed 0] [--fresh]

Ours is `ttlaunch run data_parallel -n 2 --elastic 1:2` on this machine, two workers that differ from one process in no bit: after
SIGKILL at a random moment the other one has to have made a step without it within 1 s and the time of the leaves that it
computes anew, here at most two steps, and the SHA-256 at the end has to be that of a run that nobody disturbed.

With `--stopped`, a worker gets SIGSTOP in place of SIGKILL. It has to be killed, as hung, within 5.5 s: steps are short here, so it may
be silent for 5 s. From then on the limits are those of a worker that is killed.

torchft is in no extra. Its wheel goes into a folder outside of the repository, without its requirement of torch:

    pip install --no-deps --target FOLDER torchft==0.2.0
    pip install --target FOLDER opentelemetry-exporter-otlp-proto-http

Two replicas with a million parameters average their gradients over gloo, each with its own batches (`elastic_torchft.py`). Its
coordinator waits 5 s for heartbeats by default; another series has 1 s. A replica whose host's name does not resolve hangs
silently, so all get addresses.

Each round is a line in `.benchmarks/elastic.jsonl`; the same command goes on after the last one, as long as the code has not
changed. Ways take turns. Ends with 1 if ours misses a limit.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".benchmarks" / "elastic.jsonl"
LIMIT_S = 1.0
HUNG_S = 5.5
_STEPS = 120
_FROM, _TO = 25, 60  # the steps after which somebody is killed
_WAIT_S = 120.0
_REPLICA = ROOT / "benchmarks" / "elastic_torchft.py"

Round = dict[str, Any]


def main() -> int:
    """Make the rounds that are missing, and print what all have measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=10, help="rounds of each way (default 10)")
    parser.add_argument("--stopped", type=int, default=0, help="rounds in which a worker is stopped (default 0)")
    parser.add_argument("--torchft", type=Path, help="the folder with torchft; without it only ours is measured")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    options = parser.parse_args()
    if options.fresh:
        KEPT.unlink(missing_ok=True)
    ways: dict[str, Callable[[random.Random], Round]] = {"ours, undisturbed": _undisturbed, "ours": _ours}
    if options.torchft:
        folder = options.torchft.resolve()
        ways["torchft, 5 s"] = lambda chance: _torchft(folder, chance, heartbeat_ms=5000)
        ways["torchft, 1 s"] = lambda chance: _torchft(folder, chance, heartbeat_ms=1000)
    ways["ours, stopped"] = lambda chance: _ours(chance, stop=True)
    times = {"ours, undisturbed": 1, "ours, stopped": options.stopped}
    ends = time.monotonic() + 60 * options.minutes
    for number in range(max(options.times, options.stopped)):
        for way, measure in ways.items():
            wanted = min(times.get(way, options.times), number + 1)
            if len([line for line in _kept() if line["way"] == way]) < wanted and time.monotonic() < ends:
                _keep({"way": way, **measure(random.Random(f"{options.seed} {way} {number}"))})  # noqa: S311
    return _show(_kept())


def _show(lines: list[Round]) -> int:
    hashes: dict[str, set[str]] = {}
    for line in lines:
        hashes.setdefault(line["way"], set()).add(str(line["sha256"])[:8])
    right = hashes.get("ours, undisturbed", set())
    missed = 0
    for way in ("ours", "ours, stopped", "torchft, 5 s", "torchft, 1 s"):
        rounds = [line for line in lines if line["way"] == way]
        if not rounds:
            continue
        seconds = [line["seconds"] for line in rounds]
        over = [line for line in rounds if line["seconds"] > LIMIT_S + 2 * line["step_s"]]
        is_ours = way.startswith("ours")
        limit = f"(limit {LIMIT_S:g} s and two steps; {len(over)} above)" if is_ours else ""
        step_s = statistics.median(line["step_s"] for line in rounds)
        print(
            f"{way:14} {len(rounds):3} kills: to a step without it {_spread(seconds)} s {limit}; a step {step_s:.3f} s"
        )
        same = len([line for line in rounds if str(line["sha256"])[:8] in right]) if is_ours else 0
        shown = f"{same} of {len(rounds)} as undisturbed (all)" if is_ours else f"{len(hashes[way])} different"
        print(f"{'':14} SHA-256 at the end: {shown}: {', '.join(sorted(hashes[way]))}")
        missed += (len(over) + len(rounds) - same) if is_ours else 0
        hung = [line["hung_s"] for line in rounds if "hung_s" in line]
        if hung:
            late = sum(one > HUNG_S for one in hung)
            print(f"{'':14} from SIGSTOP until it was killed: {_spread(hung)} s (limit {HUNG_S:g} s; {late} above)")
            missed += late
    print(f"{missed} missed (at most 0); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return int(missed > 0)


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} (median; {min(seconds):.2f} to {max(seconds):.2f})"


# Ours


def _undisturbed(_chance: random.Random) -> Round:
    with _run() as (process, _folder):
        return {"seconds": 0.0, "step_s": 0.0, "sha256": _finish(process)}


def _ours(chance: random.Random, *, stop: bool = False) -> Round:
    with _run() as (process, folder):
        victim, last = chance.choice([0, 1]), chance.randint(_FROM, _TO)
        survivor = 1 - victim
        _await(lambda: _applied(folder, survivor)[-1:], lambda found: found[0][0] >= last, process)
        time.sleep(chance.uniform(0, 0.3))
        before = _applied(folder, survivor)
        epoch = _epoch(folder, survivor)
        began, pid = time.time(), _pid(folder, victim)
        os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
        more: Round = {}
        if stop:
            for state in (True, False):
                _await(lambda: [_is_stopped(pid)], lambda found, state=state: found == [state], process)
            more, began = {"hung_s": time.time() - began}, time.time()
        # The first report of an epoch says from which step it starts, the next one that a step was made without the victim.
        done = _await(lambda: _applied(folder, survivor, after_epoch=epoch), lambda found: len(found) > 1, process)
        after = done[1][1]
        times = [moment for _, moment in before[-21:]]
        step_s = (times[-1] - times[0]) / max(1, len(times) - 1)
        return {"seconds": after - began, "step_s": step_s, "sha256": _finish(process), **more}


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _run() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a run in an empty folder; yields its process and its folder."""
    with tempfile.TemporaryDirectory() as place:
        words = ["data_parallel", "-n", "2", "--elastic", "1:2", "--set", f"training_config.steps={_STEPS}"]
        command = [str(Path(sys.executable).with_name("ttlaunch")), "run", *words]
        process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            [folder] = _await(lambda: list(Path(place).glob("runs/[!.]*-*")), bool, process)
            yield process, folder
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(_WAIT_S)


def _finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=2 * _WAIT_S)
    found = [line.split()[-1] for line in output.splitlines() if "sha256" in line]
    assert found, output
    return found[-1]


def _progress(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return the records of a worker; a line that is still being written is not there yet."""
    try:
        lines = (folder / "records" / f"rank-{number}.progress.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def _applied(folder: Path, number: int, *, after_epoch: int = 0) -> list[tuple[int, float]]:
    """Return the steps that a worker has applied in later epochs than this, each with the moment when it reported so first."""
    first: dict[int, float] = {}
    for line in _progress(folder, number):
        if line["kind"] == "member" and line["what"] == "progressed" and line["epoch"] > after_epoch:
            first.setdefault(line["applied"], line["time"])
    return sorted(first.items())


def _epoch(folder: Path, number: int) -> int:
    return max(line["epoch"] for line in _progress(folder, number) if line["kind"] == "member" and "epoch" in line)


def _pid(folder: Path, number: int) -> int:
    return next(int(line["pid"]) for line in _progress(folder, number) if line["kind"] == "started")


# torchft


def _torchft(folder: Path, chance: random.Random, *, heartbeat_ms: int) -> Round:
    with contextlib.ExitStack() as stack:
        words = ["coordinate", "--heartbeat-ms", str(heartbeat_ms)]
        coordinator = stack.enter_context(_replica(folder, words))
        address = _lines(coordinator)[0]["address"]
        replicas = [stack.enter_context(_replica(folder, [address, "--replica", str(one)])) for one in range(2)]
        victim, last = chance.choice([0, 1]), chance.randint(_FROM, _TO)
        survivor = replicas[1 - victim]
        ends = time.monotonic() + _WAIT_S
        while True:
            steps = [line for line in _lines(survivor) if "step" in line]
            if steps and steps[-1]["step"] >= last and steps[-1]["members"] == len(replicas):
                break
            assert time.monotonic() < ends, "the two replicas do not come together"
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        before = [line for line in _lines(survivor) if "step" in line]
        began = time.time()
        replicas[victim][0].kill()
        while not (after := [line for line in _lines(survivor) if line.get("members") == 1 and line["time"] > began]):
            assert time.monotonic() < ends + _WAIT_S, "the survivor goes on no more"
            time.sleep(0.005)
        times = [line["time"] for line in before[-21:]]
        survivor[0].wait(_WAIT_S)
        digest = next(line["sha256"] for line in _lines(survivor) if "sha256" in line)
        step_s = (times[-1] - times[0]) / max(1, len(times) - 1)
        return {"seconds": after[0]["time"] - began, "step_s": step_s, "sha256": digest}


Replica = tuple[subprocess.Popen[bytes], IO[bytes]]


@contextlib.contextmanager
def _replica(folder: Path, words: list[str]) -> Iterator[Replica]:
    """Start a replica, or the coordinator; its output goes to a file."""
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, str(_REPLICA), *words, *([] if words[0] == "coordinate" else ["--steps", str(_STEPS)])],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TORCHFT_LOG": "off"},
        )
        try:
            yield process, output.file
        finally:
            process.kill()
            process.wait()


def _lines(replica: Replica) -> list[dict[str, Any]]:
    """Return what a replica has printed; waits for the first line."""
    ends = time.monotonic() + _WAIT_S
    while True:
        lines = Path(replica[1].name).read_text().split("\n")[:-1]
        if lines or time.monotonic() > ends:
            return [json.loads(line) for line in lines]
        time.sleep(0.05)


# Both


def _await(
    look: Callable[[], list[Any]], enough: Callable[[list[Any]], object], process: subprocess.Popen[str]
) -> list[Any]:
    ends = time.monotonic() + _WAIT_S
    while True:
        found = look()
        if found and enough(found):
            return found
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < ends, "the run does not get so far"
        time.sleep(0.01)


def _keep(line: Round) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as file:
        file.write(json.dumps({"code": _code(), **line}) + "\n")


def _kept() -> list[Round]:
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return [line for line in map(json.loads, lines) if line["code"] == _code()]


def _code() -> str:
    """Return a digest of what decides how fast a run goes on."""
    packages = (
        "membership",
        "running.membership",
        "runtime.elastic",
        "runtime.comm.grpc",
        "runtime.parallel.gradients",
    )
    folders = [ROOT.joinpath("ttlaunch", *package.split(".")) for package in packages]
    paths = [path for folder in folders for path in folder.glob("*.py")]
    sources = b"".join(path.read_bytes() for path in sorted([*paths, Path(__file__), _REPLICA]))
    return hashlib.sha256(sources).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
